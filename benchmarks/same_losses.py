"""Losses of the demo model in every ZeRO stage, precision and number of ranks, which must agree (promises P1, P4).

    python benchmarks/same_losses.py                                    # 11 combinations on 1, 2 and 3 ranks
    python benchmarks/same_losses.py --precisions fp32 --ranks 1 4 --steps 50
    python benchmarks/same_losses.py --curves --steps 400               # long runs with several seeds

Each case is the real command, `dist-transformer train` on configs/demo.yaml, for some steps with dropout on, from
scratch. A figure is the largest relative difference of a step's loss per token from that of ZeRO 0 in fp32 on one rank.

Long runs of other rounding drift apart like runs of other seeds: `--curves` sets the losses that they come to beside each
other, for ways to compute and to send in 16 bits, on two ranks.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import common

from dist_transformer.processes.launching import start_local_ranks

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo.yaml"
STAGES = {"fp32": (0, 1, 2, 3), "bf16": (0, 1, 2, 3), "fp16": (1, 2, 3)}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative differences allowed. In fp32, sums in another order agree to 1e-7, until the input of a ReLU within that of
zero changes its sign: the gradient of that unit then jumps by a token's share, and Adam spreads it. The others follow
from the 8 and 11 bits of bf16 and fp16."""
LOW_LOSS_SCALE = """
from dist_transformer.training.engine import engine
engine.INITIAL_LOSS_SCALE = 1024
from dist_transformer.cli.main import main
main()
"""
"""The command, with a first loss scale of fp16 that skips no update."""
CURVES: dict[str, dict[str, object]] = {
    "fp32": {"precision": "fp32"},
    "fp32, gradients sent in bf16": {"precision": "fp32", "communication_dtype": "bf16"},
    "bf16 by autocast, ZeRO 0": {"precision": "bf16", "zero_stage": 0},
    "bf16": {"precision": "bf16"},
    "bf16, gradients sent in bf16": {"precision": "bf16", "communication_dtype": "bf16"},
    "fp16": {"precision": "fp16"},
}
SEEDS = (1, 2)
Case = tuple[str, int, int]
"""Precision, stage, ranks."""


def main() -> None:
    arguments = _arguments()
    os.environ["DIST_TRANSFORMER_FP16_ON_CPU"] = "1"
    found = common.begin(threads=1)
    if arguments.curves:
        _compare_curves(arguments, found)
        return
    cases = [
        (precision, stage, num_ranks)
        for precision in arguments.precisions
        for stage, num_ranks in product(STAGES[precision], arguments.ranks)
        if stage in arguments.stages
    ]
    with tempfile.TemporaryDirectory() as folder:
        losses = {case: _losses(case, arguments, Path(folder)) for case in dict.fromkeys([("fp32", 0, 1), *cases])}
    reference = losses["fp32", 0, 1]
    worst = {case: _difference(losses[case], reference) for case in cases}
    print("\n" + _table(worst, arguments.ranks))
    figures = {" ".join(map(str, case)): {"difference": worst[case], "losses": losses[case]} for case in cases}
    common.finish(arguments, found, figures)
    if beyond := [case for case, value in worst.items() if value > TOLERANCE[case[0]]]:
        sys.exit(f"beyond the tolerance: {beyond}")


def _compare_curves(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Prints the mean loss per token of the last tenth of the steps, and the validation's after the last, by seed."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in CURVES}
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, kind) in product(SEEDS, CURVES.items()):
            settings = {f"training.{key}": value for key, value in kind.items()}
            settings |= {
                "run.seed": seed,
                "schedule.warmup_steps": arguments.steps // 4,
                "validation.every_steps": arguments.steps,
                "validation.translate": "false",
            }
            records = _records(
                f"{seed}-{len(figures[name])}-{list(CURVES).index(name)}", settings, 2, arguments, Path(folder)
            )
            losses = [record["loss"] for record in records if record["event"] == "train"]
            last = losses[-max(1, len(losses) // 10) :]
            (validated,) = [record["loss"] for record in records if record["event"] == "validation"]
            figures[name].append({"training": sum(last) / len(last), "validation": validated})
            print(f"{name}, seed {seed}: {figures[name][-1]}", flush=True)
    rows = []
    for name, of_seeds in figures.items():
        columns = [[figure[kind] for figure in of_seeds] for kind in ("training", "validation")]
        cells = [cell for column in columns for cell in (f"{sum(column) / len(column):.4f}", _spread(column))]
        rows.append([name, *cells])
    header = ["", "training loss at the end", "by seed", "validation loss", "by seed"]
    print("\n" + common.markdown_table(header, rows))
    common.finish(arguments, found, figures)


def _spread(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _losses(case: Case, arguments: argparse.Namespace, folder: Path) -> list[float]:
    precision, stage, num_ranks = case
    name = f"{precision}-{stage}-{num_ranks}"
    settings = {"training.precision": precision, "training.zero_stage": stage}
    losses = [r["loss"] for r in _records(name, settings, num_ranks, arguments, folder) if r["event"] == "train"]
    print(f"{name}: loss {losses[0]:.5f} to {losses[-1]:.5f}", flush=True)
    return losses


def _records(
    name: str, given: dict[str, Any], num_ranks: int, arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Trains, and returns the run's metrics.jsonl; with a record of training for each step."""
    settings = {
        "run.root": folder, "run.name": name, "training.max_steps": arguments.steps, "training.log_every_steps": 1,
        "schedule.warmup_steps": arguments.steps, "data.lanes": 6, "data.max_tokens": arguments.max_tokens,
        "data.window_rows": 500, "tracking.enabled": "false", **given,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    program = [sys.executable, "-c", LOW_LOSS_SCALE, "train"]
    if start_local_ranks([str(DEMO), *overrides, "--quiet"], num_ranks, program=program):
        sys.exit(f"{name}: failed, see above")
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step"] for record in records if record["event"] == "train"]
    assert steps == list(range(1, arguments.steps + 1)), name
    return records


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True))


def _table(worst: dict[Case, float], ranks: Sequence[int]) -> str:
    kinds = list(dict.fromkeys((precision, stage) for precision, stage, _ in worst))
    rows = [
        [
            f"{precision}, ZeRO {stage}",
            *(f"{worst[precision, stage, n]:.0e}" for n in ranks),
            f"{TOLERANCE[precision]:.0e}",
        ]
        for precision, stage in kinds
    ]
    return common.markdown_table(["", *(f"{n} ranks" for n in ranks), "tolerance"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--curves", action="store_true", help="compare long runs of several seeds in place of steps")
    return common.arguments_of(parser, rounds=1)


if __name__ == "__main__":
    main()
