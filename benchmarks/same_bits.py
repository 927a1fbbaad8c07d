"""The price of `training.same_bits`: steps with it against steps without, on the same global batches.

    python benchmarks/same_bits.py                      # `small`, ZeRO 0 to 2 on two ranks, and one rank; fp32
    python benchmarks/same_bits.py --lanes-per-rank 4 --rounds 9

Each rank has one thread. A step is that of ranks.py: forward and backward pass of each lane, the exchange of gradients, the
update. Ratios are taken within a round: of wall time, and of CPU time, which other work on the machine disturbs less.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import common
from common import Figures, Rounds
from ranks import Group, add_model_arguments, settings_of
from synthetic_corpus import write_tokens

BUDGET = 1.15
WITH, WITHOUT = "same bits", "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.set_defaults(stages=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lanes-per-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="of each side in a round")
    arguments = common.arguments_of(parser, rounds=7)
    found = common.begin(1)
    together = {f"{arguments.ranks} ranks, ZeRO {stage}": (stage, arguments.ranks) for stage in arguments.stages}
    cases = {"1 rank": (0, 1), **together}
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name), arguments.pairs, arguments.vocabulary, 4096)
        rounds = {case: _rounds(*layout, Path(name), arguments) for case, layout in cases.items()}
    print(_description(arguments) + "\n\n" + _table(rounds))
    common.finish(arguments, found, rounds)


def _rounds(stage: int, num_ranks: int, folder: Path, arguments: argparse.Namespace) -> Rounds:
    settings = settings_of(arguments, stage, num_ranks * arguments.lanes_per_rank, folder, 1)
    with ExitStack() as stack:
        cases: dict[str, Callable[[], Figures]] = {}
        for name in (WITH, WITHOUT):
            group = Group(num_ranks, settings | {"same_bits": name == WITH})
            stack.callback(group.end)
            group.take(1)  # warms up: allocates memory that is reused
            cases[name] = partial(group.take, arguments.steps)
        return common.interleaved(cases, arguments.rounds)


def _description(arguments: argparse.Namespace) -> str:
    return (
        f"\n`{arguments.preset}`, vocabulary {arguments.vocabulary:,}, fp32; {arguments.lanes_per_rank} lane(s) a rank of at "
        f"most {arguments.max_tokens:,} tokens; steps a round: {arguments.steps}; medians of rounds: {arguments.rounds}"
    )


def _table(rounds: dict[str, Rounds]) -> str:
    header = ["same bits to plain", "wall time", "range", "CPU time", "range", f"budget {BUDGET}"]
    rows = []
    for case, sides in rounds.items():
        ours, plain, row = sides[WITH], sides[WITHOUT], [case]
        for figure in ("wall_seconds", "cpu_seconds"):
            row += [f"{common.median_ratio(ours, plain, figure):.3f}", common.ratio_range(ours, plain, figure)]
        row.append("kept" if common.median_ratio(ours, plain, "cpu_seconds") <= BUDGET else "missed")
        rows.append(row)
    return common.markdown_table(header, rows)


if __name__ == "__main__":
    main()
