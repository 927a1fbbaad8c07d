"""Muon: what it computes, in every stage that has it, beside torch's own; and what it is refused with."""

import math

import pytest
import torch
from plain_torch import TINY, VOCABULARY, tokens_of
from torch.optim import _muon

from dist_transformer.config.checks import cross_problems
from dist_transformer.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine import gradient_exchange, muon
from dist_transformer.training.engine.muon import matrices_of, orthogonalize

SETTINGS = OptimizerConfig(matrices="muon", weight_decay=0.1)
RATE, STEPS = 1e-2, 4


def matrices(model) -> dict[str, tuple[torch.nn.Parameter, list[int]]]:
    held = matrices_of(model)
    return {name: (p, [*held[p]]) for name, p in model.named_parameters() if p in held}


def test_the_matrices_of_the_layers_are_found_and_the_packed_ones_are_cut():
    config = TINY.model_copy(update={"key_size": 6, "value_size": 5, "activation": "swiglu"})
    found = {name: rows for name, (_, rows) in matrices(Transformer(config, VOCABULARY, VOCABULARY, 0)).items()}
    attention = {"self_attention.query_key_value": [12, 12, 10], "self_attention.output": [16]}
    feed_forward = {f"feed_forward.{name}": [32] for name in ("inner", "gate")} | {"feed_forward.outer": [16]}
    cross = {"cross_attention.query": [12], "cross_attention.key_value": [12, 10], "cross_attention.output": [16]}
    encoder = {f"encoder_layers.0.{name}.weight": rows for name, rows in {**attention, **feed_forward}.items()}
    decoder = {f"decoder_layers.0.{name}.weight": rows for name, rows in {**attention, **cross, **feed_forward}.items()}
    assert found == encoder | decoder


@pytest.mark.parametrize("most_elements", [muon.MOST_ELEMENTS, 400, 1])
def test_an_update_is_nearly_orthogonal_and_as_large_as_adams_whatever_the_batches(most_elements, monkeypatch):
    monkeypatch.setattr(muon, "MOST_ELEMENTS", most_elements)
    random = torch.Generator().manual_seed(1)
    updates = [torch.randn(shape, generator=random) for shape in ((8, 24), (24, 8), (8, 8), (24, 8), (8, 8), (6, 8))]
    results = [update.clone() for update in updates]
    orthogonalize(results)
    for part, found in zip(updates, results, strict=True):
        u, _, v = torch.linalg.svd(part, full_matrices=False)
        scale = 0.2 * math.sqrt(max(part.shape))
        values = torch.linalg.svdvals(found) / scale
        assert values.min() > 0.5
        assert values.max() < 1.3
        assert torch.cosine_similarity((u @ v).flatten(), found.flatten(), dim=0) > 0.95
        own = _muon._zeropower_via_newtonschulz(part, (3.4445, -4.775, 2.0315), 5, 1e-7).float() * scale
        assert torch.allclose(found, own, atol=1e-6)


def of_norm_1(matrix: torch.Tensor, *_: object) -> torch.Tensor:
    """In place of the iteration: it needs the whole matrix too, and does not make rounding errors larger."""
    return matrix / matrix.norm(dim=(-2, -1), keepdim=True)


def trained_by_torch(batches) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and matrices after Muon of torch for these, each of their own rows, and torch's Adam for all else."""
    torch.manual_seed(0)
    model = Transformer(TINY, VOCABULARY, VOCABULARY, 0)
    held = matrices(model)
    parts = [torch.nn.Parameter(part.detach().clone()) for p, rows in held.values() for part in p.split(rows)]
    of_matrices = torch.optim.Muon(parts, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    others = [p for name, p in model.named_parameters() if name not in held]
    groups = [
        {"params": [p for p in others if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays} for decays in (0, 1)
    ]
    adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    for number in range(STEPS):
        model.zero_grad()
        loss = model.loss(*batches[number][:3], 0.1)[0] / tokens_of(batches[number : number + 1])
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TrainingConfig().gradient_clip_norm or math.inf)
        gradients = [part for p, rows in held.values() for part in p.grad.split(rows)]
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient
        of_matrices.step()
        adam.step()
        with torch.no_grad():
            updated = iter(parts)
            for p, rows in held.values():
                p.copy_(torch.cat([next(updated) for _ in rows]))
    return losses, {name: p.detach() for name, (p, _) in held.items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training_is_that_of_torchs_muon_and_adam(make_engine, batches, stage, monkeypatch):
    monkeypatch.setattr(gradient_exchange, "LEAST_ELEMENTS", 500)
    monkeypatch.setattr(muon, "_orthogonalized", of_norm_1)
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", of_norm_1)
    engine, losses = make_engine(SETTINGS, zero_stage=stage), []
    for number in range(STEPS):
        tokens = tokens_of(batches[number : number + 1])
        loss = engine(*batches[number])[0]
        losses.append(loss.item() / tokens)
        engine.backward(loss, tokens)
        assert engine.step(RATE)
    found = {name: torch.empty(shape) for name, shape in engine.shapes().items()}
    engine.copy_weights(found)
    expected, weights = trained_by_torch(batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(found[name], weight, atol=1e-5), name


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_is_not_finite_moves_nothing(make_engine, batches, stage):
    engine = make_engine(SETTINGS, zero_stage=stage)
    engine.backward(engine(*batches[0])[0], tokens_of(batches[:1]))
    assert engine.step(RATE)
    before = {fragment.key: fragment.values.clone() for fragment in engine.fragments()}
    engine.backward(engine(*batches[1])[0] * math.inf, tokens_of(batches[:1]))
    assert not engine.step(RATE)
    assert all(torch.equal(fragment.values, before[fragment.key]) for fragment in engine.fragments())


def test_matrices_have_one_moment(make_engine):
    engine = make_engine(SETTINGS, zero_stage=1)
    parts = {fragment.key for fragment in engine.fragments()}
    assert "exp_avg/encoder_layers.0.feed_forward.inner.weight" in parts
    assert "exp_avg_sq/encoder_layers.0.feed_forward.inner.weight" not in parts
    assert "exp_avg_sq/encoder_layers.0.feed_forward.inner.bias" in parts


@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 3}, {"zero_stage": 1, "offload": "optimizer"}, {"same_bits": True, "precision": "fp32"}],
    ids=str,
)
def test_it_is_refused_where_it_is_not_itself(settings):
    given = {"optimizer": SETTINGS, "training": TrainingConfig(**settings), "model": ModelConfig()}
    key = next(key for key in ("offload", "same_bits", "zero_stage") if key in settings)
    assert [problem for problem in cross_problems(given) if f"muon cannot be used with training.{key}" in problem]


def test_an_optimizer_that_the_engine_does_not_know_is_an_error_and_not_adam(make_engine):
    with pytest.raises(KeyError, match="another"):
        make_engine(SETTINGS.model_copy(update={"matrices": "another"}))
