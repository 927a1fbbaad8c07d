"""The state of an engine: shown and set by name, whole from the start, with a moving average and frozen parts."""

import gc

import pytest
import torch
from plain_torch import TINY, VOCABULARY, tokens_of, train_on_plain_torch

from dist_transformer.config.model_size import Parameters, offloaded_bytes, state_bytes, with_effective_zero_stage
from dist_transformer.config.schema import Config, OptimizerConfig, TrainingConfig
from dist_transformer.errors import UserError
from dist_transformer.model.layers import DecoderLayer, EncoderLayer
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.engine.optimizer import deal_out
from dist_transformer.training.engine.sharded_state import Shard, fragments

FROZEN = ("*embedding*", "encoder_layers.*.bias")
KINDS = [
    dict(zero_stage=0),
    dict(zero_stage=1),
    dict(zero_stage=2),
    dict(zero_stage=3),
    dict(zero_stage=1, precision="fp16"),
    dict(zero_stage=3, precision="fp16"),
    dict(zero_stage=2, offload="optimizer"),
    dict(zero_stage=3, precision="fp16", offload="optimizer_and_parameters"),
    dict(zero_stage=2, precision="bf16"),
]
STAGES = [0, 1, 2, 3]
POSITIONS_BYTES = 2 * 4 * 256 * TINY.d_model
"""Tables of the sinusoids of both sides, 256 positions at least: 1 MB in the big model, so that no estimate counts them."""
SMALL_BYTES = 1024


def train(engine, steps) -> list[float]:
    losses = []
    for batch in steps:
        loss, _ = engine(*batch)
        engine.backward(loss, tokens_of([batch]))
        assert engine.step(1e-2)
        losses.append(float(loss.detach()) / tokens_of([batch]))
    return losses


def state_of(engine) -> dict[str, torch.Tensor]:
    return {fragment.key: fragment.values.clone() for fragment in engine.fragments()}


def reader(state, without=()):
    """The `read` of a checkpoint that holds this state."""

    def read(part, name, start, stop):
        whole = state.get(f"{part}/{name}")
        return None if part in without or whole is None else whole[start:stop]

    return read


def equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_one_rank_is_every_tensor_whole_from_the_start(make_engine, stage):
    engine = make_engine(zero_stage=stage, ema_decay=0.9, freeze=FROZEN)
    sizes = {name: torch.Size(shape).numel() for name, shape in engine.shapes().items()}
    trained = {f.name for f in engine.fragments() if f.part == "ema"}
    assert all("embedding" not in name for name in trained)
    expected = {f"weight/{name}": size for name, size in sizes.items()}
    expected |= {f"{part}/{name}": sizes[name] for name in trained for part in ("exp_avg", "exp_avg_sq", "ema")}
    assert {f.key: f.values.numel() for f in engine.fragments()} == expected
    model = Transformer(TINY, VOCABULARY, VOCABULARY, 0)
    assert engine.shapes() == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_fragments_are_the_memory_of_the_engine_itself(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage)
    held, before = engine.fragments(), state_of(engine)
    train(engine, batches[:1])
    assert equal({f.key: f.values for f in held}, state_of(engine))
    assert not equal(before, state_of(engine))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_engine_with_a_loaded_state_goes_on_bit_for_bit(make_engine, batches, kind):
    kind = dict(kind, ema_decay=0.9, freeze=FROZEN, initial_loss_scale=256, gradient_clip_norm=0.5)
    engine = make_engine(**kind)
    train(engine, batches[:3])
    state = state_of(engine)
    expected = train(engine, batches[3:6])
    other = make_engine(seed=99, **kind)
    train(other, batches[6:7])
    other.load(reader(state), 3)
    assert equal(state_of(other), state)
    assert train(other, batches[3:6]) == expected
    assert equal(state_of(other), state_of(engine))


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_checkpoint_lacks_starts_as_at_step_0(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage)
    train(engine, batches[:2])
    state = state_of(engine)
    other = make_engine(zero_stage=stage, seed=99, ema_decay=0.9)
    train(other, batches[2:4])
    other.load(reader(state, without=("exp_avg", "exp_avg_sq")), 2)
    for key, values in state_of(other).items():
        part, name = key.split("/")
        expected = torch.zeros_like(values) if part in ("exp_avg", "exp_avg_sq") else state[f"weight/{name}"]
        assert torch.equal(values, expected), key


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_state_made_at_the_start_is_what_adam_would_make_in_its_first_step(
    make_engine, batches, stage, weight_decay, monkeypatch
):
    from dist_transformer.training.engine import engine as engine_module

    settings = OptimizerConfig(weight_decay=weight_decay)
    at_once = make_engine(settings, zero_stage=stage)
    losses = train(at_once, batches[:3])
    monkeypatch.setattr(engine_module.optimizers, "make_state", lambda *arguments: None)
    lazy = make_engine(settings, zero_stage=stage)
    assert train(lazy, batches[:3]) == losses
    assert equal(state_of(lazy), state_of(at_once))


@pytest.mark.parametrize("kind", KINDS[:4] + KINDS[6:7], ids=str)
def test_freezing_and_the_moving_average_are_those_of_plain_torch(make_engine, batches, kind):
    engine = make_engine(**kind, freeze=FROZEN, ema_decay=0.3)
    before = state_of(engine)
    losses = train(engine, batches[:4])
    expected = train_on_plain_torch([[b] for b in batches[:4]], 1e-2, clip_norm=0.0, frozen=FROZEN, decay=0.3)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    state = state_of(engine)
    for name in engine.shapes():
        weight = state[f"weight/{name}"]
        if name.endswith("key_value.bias"):  # a key's bias has no gradient but rounding, which Adam makes large
            continue
        if f"ema/{name}" in state:
            torch.testing.assert_close(weight, expected.weights[name].flatten(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state[f"ema/{name}"], expected.average[name].flatten(), rtol=1e-4, atol=1e-5)
            assert not torch.equal(weight, before[f"weight/{name}"])
        else:
            assert torch.equal(weight, before[f"weight/{name}"])


def test_the_first_averages_forget_quickly(make_engine, batches):
    """The decay of update n is (1 + n) / (10 + n) until it is the given one."""
    engine = make_engine(ema_decay=0.5)
    average = {k: v for k, v in state_of(engine).items() if k.startswith("ema/")}
    for update, kept in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13)):
        train(engine, batches[update : update + 1])
        state = state_of(engine)
        for key, old in average.items():
            weight = state[key.replace("ema/", "weight/")]
            torch.testing.assert_close(state[key], kept * old + (1 - kept) * weight)
            average[key] = state[key]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(freeze=("encoder.*",)), r"training\.freeze: 'encoder\.\*' names no parameter.*encoder_layers"),
        (
            dict(freeze=("embeddings",)),
            r"'embeddings' names no parameter\. Parameters are (source|target)_embedding\.weight, ",
        ),
        (dict(freeze=("decoder_layer.*.bias",)), r"names no parameter\. Parameters are decoder_layers\.0\.\S*bias, "),
        (dict(freeze=("*",)), r"freeze all \d+ parameters.*leave some of them free"),
    ],
)
def test_patterns_that_name_nothing_or_all_are_refused_with_names_to_choose_from(make_engine, settings, said):
    with pytest.raises(UserError, match=said):
        make_engine(**settings)


def test_a_tied_matrix_is_known_by_each_of_its_names(make_engine):
    by_alias = make_engine(freeze=("target_embedding.weight",))
    assert "exp_avg/source_embedding.weight" not in state_of(by_alias)


def test_replicated_tensors_are_dealt_out_evenly_and_each_once():
    sizes = {f"p{index}": size for index, size in enumerate([50, 40, 30, 30, 20, 10, 10, 10])}
    owners = deal_out(sizes, 3)
    assert owners.keys() == sizes.keys()
    loads = [sum(sizes[name] for name in sizes if owners[name] == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 10
    held = [
        Shard(name, 0, torch.zeros(size), 0, size, is_trained=False, is_everywhere=True) for name, size in sizes.items()
    ]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    shown = [f.name for rank in range(3) for f in fragments(held, optimizer, rank, 3)]
    assert sorted(shown) == sorted(sizes)


def gradients(model, objective, batch) -> list[torch.Tensor]:
    torch.manual_seed(5)
    loss, _ = objective(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_gives_the_same_loss_and_gradients_bit_for_bit(batches, precision):
    results, calls = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = TINY.model_copy(update={"dropout": 0.3})
        model = Transformer(config, VOCABULARY, VOCABULARY, 0, activation_checkpointing=checkpointing)
        count = [0]
        for layer in model.modules():
            if isinstance(layer, EncoderLayer | DecoderLayer):
                layer.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        results.append(gradients(model, Objective(model, 0.1, precision), batches[0]))
        calls.append(count[0])
        model.eval()
        model(*batches[0][:2]).sum().backward()
        calls.append(count[0] - calls[-1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # Two layers, computed twice in training, once in evaluation.
    assert calls == [2, 2, 4, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp16"), (3, "fp32"), (3, "bf16"), (3, "fp16")])
def test_activation_checkpointing_changes_no_bit_under_zero(make_engine, batches, stage, precision):
    plain, saving = (
        make_engine(
            zero_stage=stage, precision=precision, dropout=0.3, activation_checkpointing=on, initial_loss_scale=256
        )
        for on in (False, True)
    )
    losses = []
    for engine in (plain, saving):
        torch.manual_seed(7)
        losses.append(train(engine, batches[:3]))
    assert losses[0] == losses[1]
    assert equal(state_of(plain), state_of(saving))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *(dict(zero_stage=stage, precision="fp32") for stage in (0, 1, 3)),
        *(dict(zero_stage=stage, precision="fp16") for stage in (1, 3)),
        *(dict(zero_stage=stage, precision="bf16") for stage in (1, 2)),
        dict(zero_stage=1, precision="fp32", ema_decay=0.9),
        dict(zero_stage=1, precision="fp16", offload="optimizer"),
        dict(zero_stage=3, precision="fp32", offload="optimizer"),
        dict(zero_stage=3, precision="fp16", offload="optimizer_and_parameters", ema_decay=0.9),
    ],
    ids=str,
)
def test_the_memory_estimate_is_what_an_engine_takes(make_engine, batches, kind):
    """On a CPU the two kinds of memory are one. Not estimated: DeepSpeed's two buffers of the largest parameter, and what
    is small in any model (positions, padding, flags)."""
    before = bytes_of_tensors()
    engine = make_engine(**kind)
    loss, nll = engine(*batches[0])
    engine.backward(loss, 1)
    del loss, nll
    of_layers, of_others = (
        sum(torch.Size(shape).numel() for name, shape in engine.shapes().items() if ("embedding" in name) == is_other)
        for is_other in (False, True)
    )
    training = TrainingConfig(**kind)
    estimate = state_bytes(Parameters(of_layers, of_others), training, 1)
    estimate += offloaded_bytes(of_layers + of_others, training, 1)
    largest = max(torch.Size(shape).numel() for shape in engine.shapes().values())
    taken = bytes_of_tensors() - before
    assert estimate <= 1.03 * taken
    assert taken <= 1.03 * estimate + (8 * largest if "offload" in kind else 0) + POSITIONS_BYTES + SMALL_BYTES


def bytes_of_tensors() -> int:
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp16"), (3, "fp16"), (1, "bf16"), (2, "bf16"), (0, "bf16")])
def test_masters_begin_with_the_exact_weights_and_not_with_rounded_ones(make_engine, stage, precision):
    engine = make_engine(zero_stage=stage, precision=precision, seed=5)
    torch.manual_seed(5)
    exact = dict(Transformer(TINY, VOCABULARY, VOCABULARY, 0).named_parameters())
    weights = {f.name: f.values for f in engine.fragments() if f.part == "weight"}
    assert set(weights) == set(exact)
    assert all(torch.equal(values, exact[name].flatten()[: len(values)]) for name, values in weights.items())


@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_rounds_the_masters_of_layers_and_keeps_embeddings(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage, precision="bf16", ema_decay=0.9)
    for _ in range(2):
        engine.backward(engine(*batches[0])[0], tokens_of(batches[:1]))
        assert engine.step(1e-2)
    weights = {f.name: f.values for f in engine.fragments() if f.part == "weight"}
    for name, parameter in engine.objective.model.named_parameters():
        dtype = torch.float32 if "embedding" in name else torch.bfloat16
        assert torch.equal(parameter.flatten(), weights[name].to(dtype)), name


@pytest.mark.parametrize(
    "kind",
    [dict(zero_stage=0), dict(zero_stage=1, offload="optimizer"), dict(zero_stage=2, freeze=["*.bias"])],
    ids=str,
)
def test_bf16_without_masters_of_its_own_is_autocast_over_fp32_weights(make_engine, kind):
    engine = make_engine(precision="bf16", **kind)
    assert {parameter.dtype for parameter in engine.objective.parameters()} == {torch.float32}
    with engine.objective.autocast(torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("given", "num_ranks", "stage"),
    [
        (dict(zero_stage=1, precision="fp32"), 1, 0),
        (dict(zero_stage=2, precision="bf16"), 1, 2),
        (dict(zero_stage=1, precision="bf16", freeze=["source_embedding.*"]), 1, 0),
        (dict(zero_stage=1, precision="bf16"), 2, 1),
        (dict(zero_stage=1, precision="fp16"), 1, 1),
        (dict(zero_stage=3, precision="fp32"), 1, 3),
        (dict(zero_stage=2, precision="fp32", offload="optimizer"), 1, 2),
    ],
    ids=str,
)
def test_one_rank_alone_shards_nothing_where_stage_0_can_do_the_same(given, num_ranks, stage):
    config = Config.model_validate({"data": {}, "training": given})
    training = with_effective_zero_stage(config, num_ranks).training
    assert training == config.training.model_copy(update={"zero_stage": stage})


def test_each_part_of_the_state_is_divided_from_its_stage_on():
    """Rajbhandari et al. (2020), table 1: 2 + 2 + 12 bytes a parameter in fp16, but gradients in fp32 before stage 3."""

    def bytes_in(stage: int, num_ranks: int = 4, **settings: object) -> int:
        return state_bytes(
            Parameters(800, 200), TrainingConfig(**{"zero_stage": stage, "precision": "fp16", **settings}), num_ranks
        )

    on_the_way = 500  # a quarter of 2 bytes each; stage 3: DeepSpeed's buffer
    assert [bytes_in(stage) for stage in (1, 2)] == [6000 + 3000 + on_the_way, 2000 + 1000 + 3000 + 2 * on_the_way]
    assert bytes_in(3) == 4000 + 2000
    assert bytes_in(0, precision="fp32") == 16_000
    assert bytes_in(1, ema_decay=0.9) - bytes_in(1) == 1000
    assert bytes_in(3, offload="optimizer_and_parameters") == 2000
