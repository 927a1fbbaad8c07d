"""Steps through real DeepSpeed against plain torch, and the mends of what DeepSpeed gets wrong."""

import gc
import re
import warnings
from collections import Counter

import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from plain_torch import NOTHING, TOLERANCE, micro_batches_of, ragged_batches, tokens_of, train_on_plain_torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_transformer.config.schema import OptimizerConfig
from dist_transformer.training.divergence import Diverged
from dist_transformer.training.engine.objective import inputs_of

STAGES_AND_PRECISIONS = [
    (0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"),
    (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16"),
    (1, "fp16"), (2, "fp16"), (3, "fp16"),
]  # fmt: skip
WITHOUT_BF16 = [(stage, precision) for stage, precision in STAGES_AND_PRECISIONS if precision != "bf16"]
"""The rest, and everything offloaded, is in the matrix of tests/distributed."""


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


def state_of(engine) -> dict[str, torch.Tensor]:
    return {fragment.key: fragment.values.clone() for fragment in engine.fragments()}


def weights_of(engine) -> torch.Tensor:
    return torch.cat([values for key, values in state_of(engine).items() if key.startswith("weight/")])


def overflow(engine, batch, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        loss, _ = engine(*batch)
        engine.backward(loss * float("inf"), 10)
        assert not engine.step(1e-2)


@pytest.mark.parametrize(("stage", "precision"), STAGES_AND_PRECISIONS)
def test_every_stage_and_precision_trains_as_plain_torch_does(make_engine, batches, stage, precision):
    steps = [[batch] for batch in batches[:6]]
    engine = make_engine(zero_stage=stage, precision=precision, gradient_clip_norm=1.0, initial_loss_scale=1024)
    expected = train_on_plain_torch(steps, learning_rate=1e-2, clip_norm=1.0)
    assert train(engine, steps) == pytest.approx(expected.losses, rel=TOLERANCE[precision])
    assert engine.gradient_norm() == pytest.approx(expected.norms[-1], rel=10 * TOLERANCE[precision])


@pytest.mark.parametrize(("stage", "precision"), WITHOUT_BF16)
def test_the_norm_is_of_the_unscaled_gradient_of_the_whole_step_and_clipping_is_by_it(
    make_engine, batches, stage, precision
):
    """Adam hides the size of a gradient in the weights, but not in its first moment: (1 - beta1) * clipped gradient."""
    clip, tolerance = 0.25, TOLERANCE[precision]
    engine = make_engine(zero_stage=stage, precision=precision, gradient_clip_norm=clip, initial_loss_scale=1024)
    expected = train_on_plain_torch([batches[:4]], learning_rate=1e-2, clip_norm=clip)
    train(engine, [batches[:4]])
    assert expected.norms[0] > 2 * clip
    assert engine.gradient_norm() == pytest.approx(expected.norms[0], rel=10 * tolerance)
    moment = torch.cat([values for key, values in state_of(engine).items() if key.startswith("exp_avg/")])
    assert float(moment.norm()) == pytest.approx(0.1 * clip, rel=tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_micro_batches_are_one_step_on_all_their_tokens(make_engine, batches, stage):
    """P4: the loss of ragged micro-batches is divided by the tokens of the whole step."""
    steps = [batches[0:4], batches[4:8]]
    expected = train_on_plain_torch(steps, learning_rate=1e-2, clip_norm=0.0)
    assert train(make_engine(zero_stage=stage), steps) == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_micro_batch_without_real_targets_changes_nothing(make_engine, batches, stage):
    with_it = train(make_engine(zero_stage=stage), [[batches[0], NOTHING], [batches[1]]])
    assert with_it == train(make_engine(zero_stage=stage), [[batches[0]], [batches[1]]])


@pytest.mark.parametrize(("stage", "precision"), WITHOUT_BF16)
def test_a_gradient_that_is_not_finite_moves_nothing(make_engine, batches, stage, precision):
    """Neither then nor later: the step after it is as if it had not been."""
    settings = dict(zero_stage=stage, precision=precision, ema_decay=0.9, initial_loss_scale=1024)
    engine = make_engine(**settings)
    train(engine, [[batches[0]]])
    before = state_of(engine)
    overflow(engine, batches[1])
    after = state_of(engine)
    assert all(torch.equal(after[key], values) for key, values in before.items())
    train(engine, [[batches[2]]])
    # With the scale at which the other one goes on, all bits are the same.
    undisturbed = make_engine(**settings)
    train(undisturbed, [[batches[0]]])
    undisturbed.set_scaler_state({"cur_scale": 512.0})
    train(undisturbed, [[batches[2]]])
    assert torch.equal(weights_of(engine), weights_of(undisturbed))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_with_same_bits_a_gradient_that_is_not_finite_moves_nothing_either(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage, ema_decay=0.9, same_bits=True)
    train(engine, [[batches[0]]])
    before = state_of(engine)
    overflow(engine, batches[1])
    after = state_of(engine)
    assert all(torch.equal(after[key], values) for key, values in before.items())


def test_with_same_bits_the_order_of_micro_batches_and_the_stage_do_not_show(make_engine, batches):
    found = []
    for stage, order in ((0, (0, 1, 2)), (0, (2, 0, 1)), (1, (1, 0, 2)), (2, (2, 1, 0))):
        engine = make_engine(zero_stage=stage, same_bits=True, gradient_clip_norm=0.1)
        train(engine, [[batches[number] for number in order]] * 3)
        found.append(weights_of(engine))
    assert all(torch.equal(weights, found[0]) for weights in found[1:])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_updates_keep_their_size_while_the_loss_scale_grows(make_engine, batches, stage, monkeypatch):
    """With SGD an update is the gradient: DeepSpeed 0.19.8 halves it at each growth (facts behind `delay_scale_growth`)."""
    from dist_transformer.training.engine import engine as engine_module

    monkeypatch.setattr(
        engine_module.optimizers,
        "build_optimizer",
        lambda _, parameters, *__: torch.optim.SGD(parameters, lr=1.0, fused=True),
    )
    engine = make_engine(zero_stage=stage, precision="fp16", initial_loss_scale=64, loss_scale_window=2)
    scales = []
    for _ in range(7):
        before = weights_of(engine)
        train(engine, [[batches[0]]], learning_rate=1e-3)
        update = float((weights_of(engine) - before).norm())
        assert update == pytest.approx(1e-3 * engine.gradient_norm(), rel=1e-2)
        scales.append(engine.loss_scale())
    assert scales[-1] >= 4 * scales[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_fp16_overflow_halves_the_scale(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage, precision="fp16", initial_loss_scale=1024)
    overflow(engine, batches[1])
    assert engine.loss_scale() == 512


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_floor_of_the_loss_scale_is_divergence_since_the_step_that_never_came(make_engine, batches, stage):
    engine = make_engine(zero_stage=stage, precision="fp16", initial_loss_scale=4)
    train(engine, [[batches[0]], [batches[1]]])
    before = state_of(engine)
    overflow(engine, batches[2], num_steps=2)
    assert engine.loss_scale() == 1
    with pytest.raises(Diverged, match="loss scale is at its minimum") as raised:
        overflow(engine, batches[2])
    assert raised.value.since_step == 3
    assert all(torch.equal(state_of(engine)[key], values) for key, values in before.items())
    train(engine, [[batches[3]]])  # nothing of the gradient is left: the engine can go on from a checkpoint


def test_weight_decay_leaves_vectors_alone(make_engine, batches):
    engine = make_engine(OptimizerConfig(weight_decay=0.5))
    before = state_of(engine)
    loss, _ = engine(*batches[0])
    engine.backward(loss * 0.0, 1)
    engine.step(0.1)
    for name, shape in engine.shapes().items():
        expected = before[f"weight/{name}"] * (1.0 if len(shape) == 1 else 1 - 0.1 * 0.5)
        torch.testing.assert_close(state_of(engine)[f"weight/{name}"], expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_collective_of_deepspeed_is_named_once_before_it_begins(make_engine, batches, ranks, stage, monkeypatch):
    """Of the newest engine, however many the process has had."""
    heard: list[str] = []
    monkeypatch.setattr(type(ranks), "note_collective", lambda self, text: heard.append(text))
    called = count_collectives(monkeypatch)
    make_engine(zero_stage=stage)
    engine = make_engine(zero_stage=stage)
    del heard[:], called[:]
    train(engine, [[batches[0]]])
    moved = [text.split(" of ")[0] for text in heard]
    # DeepSpeed keeps these two functions of torch from its import on, where counting cannot reach them.
    kept = {"all_gather_into_tensor", "reduce_scatter_tensor"}
    assert [name for name in moved if name not in kept] == called
    assert bool(called) == (stage == 3)  # one rank has nobody to sum with; stage 3 calls all the same
    assert not kept - set(moved) or stage < 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_moves_all_in_the_one_group_and_first_a_tensor(make_engine, ranks, stage, monkeypatch):
    """For a barrier that comes first torch guesses the GPU from the rank: two ranks of a node may get the same one."""
    heard: list[str] = []
    monkeypatch.setattr(type(ranks), "note_collective", lambda self, text: heard.append(text))
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)  # kept from an engine before
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_, **__: pytest.fail("a second group of all ranks"))
    make_engine(zero_stage=stage)
    assert groups._WORLD_GROUP is torch.distributed.group.WORLD
    assert heard[0].startswith("broadcast of ")


def test_a_local_rank_that_a_shell_has_from_mpirun_is_not_asked(make_engine, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    make_engine()


def count_collectives(monkeypatch) -> list[str]:
    """The names of torch's collectives as they are called."""
    called: list[str] = []

    def counting(name, function):
        def call(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"):
        monkeypatch.setattr(torch.distributed, name, counting(name, getattr(torch.distributed, name)))
    return called


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_never_waits_for_the_whole_device(make_engine, batches, stage, monkeypatch):
    """Each such wait leaves a GPU without work until the next kernels are sent."""
    engine = make_engine(zero_stage=stage)
    train(engine, [[batches[0]]])
    gc.collect()  # an engine of a test before waits as it goes
    waits = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda *_: waits.append(1))
    train(engine, [batches, batches])
    assert not waits


class Calls(TorchDispatchMode):
    """Counts what is called of torch below autograd, by name."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.of[function.overloadpacket.__name__] += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("stage", "precision"), STAGES_AND_PRECISIONS)
def test_a_step_asks_a_device_for_numbers_only_in_the_update(make_engine, ranks, stage, precision):
    """A GPU without work waits for the host to hear what it asked: of DeepSpeed, whether the gradient is finite."""
    engine = make_engine(zero_stage=stage, precision=precision, dropout=0.1, ema_decay=0.9)
    batches = micro_batches_of(ragged_batches(3))
    asking = ("nonzero", "_local_scalar_dense", "masked_select", "equal")
    for _ in range(2):
        with Calls() as passes:
            for batch in batches:
                loss, _ = engine(*inputs_of([batch], ranks.device))
                engine.backward(loss, 20)
        with Calls() as update:
            engine.step(1e-3)
    assert passes.of["nonzero_static"] == 3
    assert not any(passes.of[name] for name in asking)
    assert sum(update.of[name] for name in asking) <= 3


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_host_waits_for_the_norm_as_in_a_collective(make_engine, batches, ranks, stage, monkeypatch):
    """On a GPU it waits there for a rank that hangs: those before were only queued."""
    engine, asked = make_engine(zero_stage=stage), []
    of_tensor = torch.Tensor.__bool__, torch.Tensor.__float__
    for name, function in zip(("__bool__", "__float__"), of_tensor, strict=True):
        monkeypatch.setattr(
            torch.Tensor, name, lambda number, function=function: asked.append(ranks.last.text()) or function(number)
        )
    loss, _ = engine(*batches[0])
    engine.backward(loss, 10)
    del asked[:]
    engine.step(1e-2)
    waits = [text for text in asked if re.match(r"in collective \d+ \(waiting for the device\)", text)]
    assert len(waits) == 1
    assert ranks.last.ended is not None


def test_stage_0_on_one_rank_copies_no_gradient(make_engine, batches, monkeypatch):
    """DeepSpeed lays all of them into one tensor, for a sum over the ranks."""
    engine = make_engine(zero_stage=0)
    flattened = []
    monkeypatch.setattr(DeepSpeedEngine, "allreduce_bucket", lambda *_: flattened.append(1))
    train(engine, [batches[:4]])
    assert not flattened


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_engine_holds_no_memory(make_engine, batches, stage):
    """What a rollback builds beside it must fit: DeepSpeed keeps references to stage 3's engine in globals."""
    engine = make_engine(zero_stage=stage)
    train(engine, [[batches[0]]])
    held = {fragment.values.untyped_storage().data_ptr() for fragment in engine.fragments()}
    assert held <= addresses_in_use()
    engine.close()
    assert not held & addresses_in_use()


def addresses_in_use() -> set[int]:
    """Of the memory of all tensors that Python knows of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated things that are only looked at
        tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.untyped_storage().nbytes()}
