"""Every combination of stage, precision and option on real gloo ranks; `python matrix_program.py --write` makes the page.

`matrix_program.py RESULTS NUM_RANKS` trains them one after another on the same four lanes, and rank 0 writes what came
out as JSON: losses, gradient norms, what a gradient that was infinite on one rank moved, and whether the fragments of
all ranks make up the whole state.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
PAGE = ROOT / "docs" / "engine_matrix.md"

from plain_torch import (  # noqa: E402
    NOTHING,
    TINY,
    TOLERANCE,
    VOCABULARY,
    PlainRun,
    micro_batches_of,
    ragged_batches,
    tokens_of,
    train_on_plain_torch,
)
from running import Command  # noqa: E402

from dist_transformer.config.checks import cross_problems  # noqa: E402
from dist_transformer.config.schema import OptimizerConfig, TrainingConfig  # noqa: E402
from dist_transformer.processes.launching import fork_local_ranks  # noqa: E402

LANES, STEPS, CLIP, LEARNING_RATE = 4, 6, 0.2, 1e-2
SKIPPED_AFTER = 3
FROZEN, DECAY = ("*embedding*", "encoder_layers.*.bias"), 0.9
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "`offload: optimizer`": {"offload": "optimizer"},
    "`offload: optimizer_and_parameters`": {"offload": "optimizer_and_parameters"},
    "`activation_checkpointing`": {"activation_checkpointing": True},
    "`communication_dtype: bf16`": {"communication_dtype": "bf16"},
    "`lanes_per_pass: 2`": {"lanes_per_pass": 2},
    "`ema_decay` and `freeze`": {"ema_decay": DECAY, "freeze": FROZEN},
    "all of these": {"activation_checkpointing": True, "ema_decay": DECAY, "freeze": FROZEN, "offload": "optimizer"},
}
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclasses.dataclass(frozen=True)
class Combination:
    stage: int
    option: str
    precision: str

    @property
    def settings(self) -> TrainingConfig:
        given = dict(OPTIONS[self.option], zero_stage=self.stage, precision=self.precision)
        if self.option == "all of these" and self.stage in (0, 3):
            given["offload"] = "none" if self.stage == 0 else "optimizer_and_parameters"
        return TrainingConfig(**given, gradient_clip_norm=CLIP)

    @property
    def tolerance(self) -> float:
        """Of losses, relative."""
        kinds = (self.precision, "bf16" if self.settings.communication_dtype == "bf16" else self.precision)
        return max(TOLERANCE[kind] for kind in kinds)

    @property
    def refusal(self) -> str | None:
        """What the configuration's check says against it."""
        return next(iter(cross_problems({"training": self.settings})), None)

    def runs_on(self, num_ranks: int) -> bool:
        """Everything on 2 ranks; for time, on 1 no option in a short precision, and not all options together, and on 3 no
        option."""
        is_in_all = not OPTIONS[self.option] or (
            num_ranks == 1 and self.precision == "fp32" and self.option != "all of these"
        )
        return self.refusal is None and (num_ranks == 2 or is_in_all)


COMBINATIONS = [
    Combination(stage, option, precision) for stage in range(4) for option in OPTIONS for precision in PRECISIONS
]


def steps() -> list[list[Any]]:
    """The lanes' micro-batches of each step."""
    batches = ragged_batches(LANES * STEPS)
    return [batches[start : start + LANES] for start in range(0, len(batches), LANES)]


def reference(combination: Combination) -> PlainRun:
    """The same training by torch alone, in fp32."""
    return _plain(combination.settings.freeze)


@functools.cache
def _plain(frozen: tuple[str, ...]) -> PlainRun:
    return train_on_plain_torch(steps(), LEARNING_RATE, CLIP, frozen)


def launch(command: Command, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The results of all combinations on so many ranks."""
    results = folder / f"matrix_{num_ranks}.json"
    code, said = command.program(Path(__file__), results, num_ranks)
    assert code == 0, f"matrix_program.py on {num_ranks} ranks ended with {code}\n{said}"
    return json.loads(results.read_text(encoding="utf-8"))


def deviation(result: dict[str, Any]) -> float:
    """The largest relative difference of a loss from plain torch's."""
    expected = reference(Combination(*result["combination"])).losses
    return max(abs(loss - other) / other for loss, other in zip(result["losses"], expected, strict=True))


def page(results: list[dict[str, Any]]) -> str:
    """The table of what runs with what."""
    worst: dict[Combination, float] = {}
    for result in results:
        combination = Combination(*result["combination"])
        worst[combination] = max(worst.get(combination, 0.0), deviation(result))
    reasons: list[str] = []
    rows = [
        f"| {stage} | {option} | {' | '.join(_cell(Combination(stage, option, p), worst, reasons) for p in PRECISIONS)} |"
        for stage in range(4)
        for option in OPTIONS
    ]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([_HEAD, *rows, "", "What is refused, and the words:", "", *notes, ""])


def _cell(combination: Combination, worst: dict[Combination, float], reasons: list[str]) -> str:
    if combination in worst:
        return f"yes, 1e{math.ceil(math.log10(max(worst[combination], 1e-7)))}"
    reason = combination.refusal
    assert reason is not None, combination
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"


_HEAD = f"""\
# What runs with what

Written by `python tests/distributed/matrix_program.py --write` and compared by `tests/distributed/test_training_matrix.py`:
do not edit. Each combination of ZeRO stage, precision and option of `training` trained the same tiny model for {STEPS} steps of
{LANES} ragged lanes on real ranks (gloo, CPU), with clipping that bound in every step: all of them on 2 ranks, those without an
option on 1 and 3 ranks too, those in fp32 on 1. "all of these" is what the stage can have of them at once.

"yes" is followed by the largest relative difference of a loss from that of plain torch in fp32, rounded up to a power of
ten; allowed are {TOLERANCE["fp32"]:g} in fp32, {TOLERANCE["bf16"]:g} where bf16 takes part, {TOLERANCE["fp16"]:g} in fp16.
On 2 and 3 ranks a gradient was infinite on one rank after step {SKIPPED_AFTER}: all skipped it, nothing moved, and the
losses that followed stayed those of plain torch.

| stage | with | fp32 | bf16 | fp16 |
|---|---|---|---|---|"""


def run_as_rank(path: Path, takes_everything: bool) -> None:
    """`takes_everything`: all combinations that are not refused, whatever the number of ranks."""
    from dist_transformer.distributed import group

    ranks = group.join(120)
    results = [_train(c, ranks) for c in COMBINATIONS if c.runs_on(2 if takes_everything else ranks.num_ranks)]
    if ranks.is_rank_zero:
        path.write_text(json.dumps(results), encoding="utf-8")
    ranks.barrier()
    group.leave()
    os._exit(0)  # as `train` does: threads of gloo's may outlive the interpreter, and abort


def _train(combination: Combination, ranks: Any) -> dict[str, Any]:
    """One combination; every rank gives the same result."""
    engine, at_once = _engine(combination, ranks), combination.settings.lanes_per_pass
    result: dict[str, Any] = {
        "combination": dataclasses.astuple(combination),
        "losses": [],
        "norms": [],
        "moved_by_infinity": [],
    }
    for number, micro_batches in enumerate(steps(), start=1):
        result["losses"].append(_step(engine, ranks, micro_batches, at_once))
        result["norms"].append(engine.gradient_norm())
        if number == 1:
            result["first_moment_norm"] = _first_moment_norm(engine, ranks)
        if number == SKIPPED_AFTER and ranks.num_ranks > 1:
            result["moved_by_infinity"] = _inject(engine, ranks, micro_batches)
            state, scaler = _whole_state(engine, ranks), engine.scaler_state()
    result["not_tiled"] = _not_tiled(engine, ranks)
    _copy_as_a_save_does(engine)
    if ranks.num_ranks == 2:
        engine.load(lambda part, name, start, stop: state[f"{part}/{name}"][start:stop], SKIPPED_AFTER)
        engine.set_scaler_state(scaler)
        result["losses_again"] = [
            _step(engine, ranks, micro_batches, at_once) for micro_batches in steps()[SKIPPED_AFTER:]
        ]
    engine.close()
    return result


def _engine(combination: Combination, ranks: Any) -> Any:
    import torch

    from dist_transformer.model.transformer import Transformer
    from dist_transformer.training.engine import engine as engine_module
    from dist_transformer.training.engine import gradient_exchange
    from dist_transformer.training.engine.engine import Engine
    from dist_transformer.training.engine.objective import Objective

    settings = combination.settings
    torch.manual_seed(0)
    checkpointing = settings.activation_checkpointing
    model = Transformer(TINY, VOCABULARY, VOCABULARY, 0, activation_checkpointing=checkpointing)
    engine_module.INITIAL_LOSS_SCALE = 1024  # no update is skipped
    gradient_exchange.LEAST_ELEMENTS = 500  # many buckets
    return Engine(Objective(model, 0.1, settings.precision), settings, OptimizerConfig(), ranks)


def _forward_and_backward(
    engine: Any, ranks: Any, micro_batches: list[Any], factor: float = 1.0, at_once: int = 1
) -> float:
    """The loss per token of the lanes dealt over the ranks; where they run out, micro-batches that weigh nothing."""
    import torch

    from dist_transformer.training.engine.objective import inputs_of

    tokens, total = tokens_of(micro_batches), torch.zeros(1, dtype=torch.float64)
    slots = -(-LANES // ranks.num_ranks)
    mine = micro_batches[ranks.rank :: ranks.num_ranks]
    for first in range(0, slots, at_once):
        part = mine[first : first + at_once]
        part += [NOTHING] * (min(at_once, slots - first) - len(part))
        loss, _ = engine(*inputs_of(micro_batches_of(part), ranks.device))
        engine.backward(loss * factor, tokens, is_last=first + at_once >= slots)
        total += loss.detach().double().cpu()
    return float(ranks.all_reduce_sum(total)) / tokens


def _step(engine: Any, ranks: Any, micro_batches: list[Any], at_once: int) -> float:
    loss = _forward_and_backward(engine, ranks, micro_batches, at_once=at_once)
    assert engine.step(LEARNING_RATE)
    return loss


def _whole_state(engine: Any, ranks: Any) -> dict[str, Any]:
    """Every tensor whole, from the fragments of all ranks."""
    import torch

    mine = [(f.key, f.start, f.values.cpu().clone()) for f in engine.fragments()]
    parts: dict[str, list[Any]] = {}
    for key, _, values in sorted((f for part in ranks.all_gather_object(mine) for f in part), key=lambda f: f[:2]):
        parts.setdefault(key, []).append(values)
    return {key: torch.cat(values) for key, values in parts.items()}


def _inject(engine: Any, ranks: Any, micro_batches: list[Any]) -> list[str]:
    """A step whose gradient is infinite on rank 1 alone: what of it was not skipped, on any rank."""
    import torch

    before = {fragment.key: fragment.values.clone() for fragment in engine.fragments()}
    _forward_and_backward(engine, ranks, micro_batches, float("inf") if ranks.rank == 1 else 1.0)
    moved = [f"rank {ranks.rank} updated"] if engine.step(LEARNING_RATE) else []
    moved += [f.key for f in engine.fragments() if not torch.equal(f.values, before[f.key])]
    return [what for part in ranks.all_gather_object(moved) for what in part]


def _copy_as_a_save_does(engine: Any) -> None:
    from dist_transformer.training.checkpoint.async_writer import StagingBuffer
    from dist_transformer.training.engine.bit_sums import bit_sum, sums_by_part

    copy, fragments = StagingBuffer(), engine.fragments()
    copy.take(fragments)
    assert int(sums_by_part(fragments).sum()) == int(bit_sum(copy.fragments.values())), "the copy is not the state"


def _first_moment_norm(engine: Any, ranks: Any) -> float:
    import torch

    squares = sum(float(f.values.double().square().sum()) for f in engine.fragments() if f.part == "exp_avg")
    return math.sqrt(float(ranks.all_reduce_sum(torch.tensor([squares], dtype=torch.float64))))


def _not_tiled(engine: Any, ranks: Any) -> list[str]:
    """Tensors whose fragments over all ranks leave a gap or lie over each other."""
    mine = [(f.key, f.start, f.start + f.values.numel()) for f in engine.fragments()]
    spans = sorted(span for part in ranks.all_gather_object(mine) for span in part)
    at: Counter[str] = Counter()
    wrong = []
    for key, start, stop in spans:
        wrong += [key] if at[key] != start else []
        at[key] = stop
    sizes = {name: math.prod(shape) for name, shape in engine.shapes().items()}
    wrong += [key for key, stop in at.items() if stop != sizes[key.split("/")[1]]]
    return wrong + [name for name in sizes if f"weight/{name}" not in at]


def main() -> None:
    if sys.argv[1] == "--write":
        with tempfile.TemporaryDirectory() as folder:
            command = Command(Path(folder))
            PAGE.write_text(page([r for n in (1, 2, 3) for r in launch(command, n, Path(folder))]), encoding="utf-8")
    elif "--everything" in sys.argv:
        run_as_rank(Path(sys.argv[1]), takes_everything=True)
    else:
        work = functools.partial(run_as_rank, Path(sys.argv[1]), takes_everything=False)
        sys.exit(fork_local_ranks(work, int(sys.argv[2])))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
