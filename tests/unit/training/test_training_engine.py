"""Steps through real DeepSpeed against plain torch, and the mends of what DeepSpeed gets wrong."""

import pytest
import torch
from plain_torch import TINY, VOCABULARY, adam_on_plain_torch

from dist_transformer.config.models import OptimizerConfig
from dist_transformer.errors import UserError

STAGES_AND_PRECISIONS = [
    (0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"),
    (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16"),
    (1, "fp16"), (2, "fp16"), (3, "fp16"),
]  # fmt: skip
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Of losses over six steps: float order, then the 8 and 11 bits of the two short formats."""


def tokens_of(micro_batches) -> int:
    return sum(int((target != 0).sum()) for _, _, target in micro_batches)


def train(engine, steps, learning_rate=1e-2) -> list[float]:
    """Losses per token of steps of several micro-batches."""
    losses = []
    for micro_batches in steps:
        tokens, total = tokens_of(micro_batches), 0.0
        for micro_batch in micro_batches:
            loss, _ = engine(*micro_batch)
            engine.backward(loss, tokens)
            total += float(loss.detach())
        assert engine.step(learning_rate)
        losses.append(total / tokens)
    return losses


@pytest.mark.parametrize(("stage", "precision"), STAGES_AND_PRECISIONS)
def test_every_stage_and_precision_trains_as_plain_torch_does(make_engine, batches, stage, precision):
    steps = [[batch] for batch in batches[:6]]
    engine = make_engine(zero_stage=stage, precision=precision, gradient_clip_norm=1.0, initial_loss_scale=1024)
    expected, norms = adam_on_plain_torch(TINY, VOCABULARY, steps, learning_rate=1e-2, clip_norm=1.0)
    assert train(engine, steps) == pytest.approx(expected, rel=TOLERANCE[precision])
    assert engine.gradient_norm() == pytest.approx(norms[-1], rel=10 * TOLERANCE[precision])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_micro_batches_are_one_step_on_all_their_tokens(make_engine, batches, stage):
    """P4: the loss of ragged micro-batches is divided by the tokens of the whole step."""
    steps = [batches[0:4], batches[4:8]]
    expected, _ = adam_on_plain_torch(TINY, VOCABULARY, steps, learning_rate=1e-2, clip_norm=0.0)
    assert train(make_engine(zero_stage=stage), steps) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_micro_batch_without_real_targets_changes_nothing(make_engine, batches, stage):
    nothing = (torch.full((1, 1), 2), torch.full((1, 1), 1), torch.zeros(1, 1, dtype=torch.long))
    with_it = train(make_engine(zero_stage=stage), [[batches[0], nothing], [batches[1]]])
    assert with_it == train(make_engine(zero_stage=stage), [[batches[0]], [batches[1]]])


def parameters_of(engine) -> torch.Tensor:
    return torch.cat([engine.read(p).weight.flatten() for _, p in engine.parameters()])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_moves_nothing(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage)
    train(engine, [[batches[0]]])
    before = parameters_of(engine)
    loss, _ = engine(*batches[1])
    engine.backward(loss * float("inf"), 10)
    assert not engine.step(1e-2)
    assert torch.equal(parameters_of(engine), before)
    train(engine, [[batches[2]]])
    assert torch.isfinite(parameters_of(engine)).all()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_updates_keep_their_size_while_the_loss_scale_grows(make_engine, batches, stage, monkeypatch):
    """With SGD an update is the gradient: DeepSpeed 0.19.8 halves it at each growth (facts behind `_delay_scale_growth`)."""
    from dist_transformer.training import engine as engine_module

    monkeypatch.setattr(
        engine_module, "_adam", lambda module, settings, device: torch.optim.SGD(module.parameters(), lr=1.0)
    )
    engine = make_engine(zero_stage=stage, precision="fp16", initial_loss_scale=64, loss_scale_window=2)
    scales = []
    for _ in range(7):
        before = parameters_of_sgd(engine)
        loss, _ = engine(*batches[0])
        engine.backward(loss, tokens_of(batches[:1]))
        assert engine.step(1e-3)
        update = float((parameters_of_sgd(engine) - before).norm())
        assert update == pytest.approx(1e-3 * engine.gradient_norm(), rel=1e-2)
        scales.append(engine.loss_scale())
    assert scales[-1] >= 4 * scales[0]


def parameters_of_sgd(engine) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    return torch.cat([safe_get_full_fp32_param(p).detach().flatten().clone() for _, p in engine.parameters()])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_fp16_overflow_halves_the_scale_and_skips_the_update(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage, precision="fp16", initial_loss_scale=1024)
    train(engine, [[batches[0]]])
    before, scale = parameters_of(engine), engine.loss_scale()
    loss, _ = engine(*batches[1])
    engine.backward(loss * float("inf"), 10)
    assert not engine.step(1e-2)
    assert engine.loss_scale() == scale / 2
    assert torch.equal(parameters_of(engine), before)


def test_the_floor_of_the_loss_scale_is_an_error_that_says_what_to_do(make_engine, batches):
    engine = make_engine(precision="fp16", initial_loss_scale=2)
    with pytest.raises(UserError, match=r"loss scale is at its minimum.*lower optimizer\.learning_rate"):
        overflow(engine, batches[0], num_steps=4)


def overflow(engine, batch, num_steps: int) -> None:
    for _ in range(num_steps):
        loss, _ = engine(*batch)
        engine.backward(loss * float("inf"), 10)
        engine.step(1e-2)


def test_weight_decay_leaves_vectors_alone(make_engine, batches):
    engine = make_engine(OptimizerConfig(weight_decay=0.5))
    before = {name: engine.read(p).weight for name, p in engine.parameters()}
    loss, _ = engine(*batches[0])
    engine.backward(loss * 0.0, 1)
    engine.step(0.1)
    for name, parameter in engine.parameters():
        expected = before[name] * (1 - 0.1 * 0.5 if parameter.dim() > 1 else 1.0)
        torch.testing.assert_close(engine.read(parameter).weight, expected)
