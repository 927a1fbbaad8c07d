"""Cost of planning an epoch: seconds and memory, for a corpus that consists only of its manifest.

    python benchmarks/plan.py                                # 50,000,000 pairs
    python benchmarks/plan.py --pairs 1000000000 --lanes 64 512

Planning is the computation of the rows of every window of an epoch: the manifest is loaded, the row groups are permuted
and cut into lanes and windows, and every window's request is made once. Each case runs in a process of its own; memory
is the peak that Python and numpy allocate beyond the imported modules, measured in another process.
"""

import argparse
import multiprocessing
import tempfile
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import common
from common import Figures, Rounds, Stopwatch
from synthetic_corpus import MEAN_SOURCE_TOKENS, MEAN_TARGET_TOKENS, Corpus, manifest_of

from dist_transformer.data.manifest import Manifest, RowGroup, Shard

VOCABULARY = 32_000
SHARD_ROWS = 1 << 20
MAX_TOKENS = 8192
BUDGET_PAIRS = 50_000_000
BUDGET_SECONDS = 1.0
BUDGET_MEGABYTES = 200.0


def main() -> None:
    arguments = _arguments()
    found = common.begin(threads=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest_of(_shards(arguments.pairs, arguments.row_group_rows), VOCABULARY).save(folder)
        print(f"{arguments.pairs:,} pairs in row groups of {arguments.row_group_rows:,}; windows of at most "
              f"{arguments.window_rows:,} pairs; medians of rounds: {arguments.rounds}")  # fmt: skip
        cases: dict[str, Callable[[], Figures]] = {
            str(lanes): partial(_planned, folder, lanes, arguments.window_rows) for lanes in arguments.lanes
        }
        rounds = common.interleaved(cases, arguments.rounds)
    print("\n" + _table(rounds, arguments.pairs))
    common.finish(arguments, found, {"plan": rounds})


def plan_epoch(folder: Path, lanes: int, window_rows: int) -> Figures:
    """Loads the manifest and makes all requests of the first epoch, in this process."""
    clock = Stopwatch(with_descendants=False)
    run = Corpus(folder, Manifest.load(folder)).run_data(lanes, MAX_TOKENS, window_rows)
    load_seconds, _ = clock.read()
    plan = run.planner.plan(run.start().partition)
    windows, rows = 0, 0
    for lane in range(lanes):
        for window in range(plan.num_windows(lane)):
            windows += 1
            rows += sum(piece.last - piece.first for piece in plan.request(lane, window).slices)
    seconds, _ = clock.read()
    return {"windows": windows, "rows": rows, "load_seconds": load_seconds, "plan_seconds": seconds - load_seconds}


def plan_epoch_with_memory(folder: Path, lanes: int, window_rows: int) -> Figures:
    """Measures the peak of the memory that `plan_epoch` allocates."""
    tracemalloc.start()
    plan_epoch(folder, lanes, window_rows)
    _, peak_bytes = tracemalloc.get_traced_memory()
    return {"megabytes": peak_bytes / 1e6}


def _planned(folder: Path, lanes: int, window_rows: int) -> Figures:
    figures: Figures = {}
    for measure in (plan_epoch, plan_epoch_with_memory):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            figures |= process.submit(measure, folder, lanes, window_rows).result()
    return figures


def _shards(num_pairs: int, row_group_rows: int) -> list[Shard]:
    shards = []
    for first in range(0, num_pairs, SHARD_ROWS):
        rows_of_shard = min(SHARD_ROWS, num_pairs - first)
        groups = tuple(
            RowGroup(rows, round(rows * MEAN_SOURCE_TOKENS), round(rows * MEAN_TARGET_TOKENS))
            for rows in _row_groups(rows_of_shard, row_group_rows)
        )
        shards.append(Shard(f"shards/train-{len(shards):05d}.parquet", 1, "0" * 64, groups))
    return shards


def _row_groups(num_rows: int, row_group_rows: int) -> list[int]:
    return [min(row_group_rows, num_rows - first) for first in range(0, num_rows, row_group_rows)]


def _table(rounds: Rounds, num_pairs: int) -> str:
    budget = f"budget at {BUDGET_PAIRS:,} pairs: {BUDGET_SECONDS:g} s, {BUDGET_MEGABYTES:g} MB"
    header = ["lanes", "windows", "load the manifest, s", "plan the epoch, s", "peak memory, MB", budget]
    rows = []
    for lanes, samples in rounds.items():
        load, plan, megabytes = (common.median(samples, f) for f in ("load_seconds", "plan_seconds", "megabytes"))
        kept = load + plan <= BUDGET_SECONDS and megabytes <= BUDGET_MEGABYTES
        verdict = ("kept" if kept else "missed") if num_pairs == BUDGET_PAIRS else ""
        rows.append([lanes, f"{samples[0]['windows']:,.0f}", f"{load:.2f}", f"{plan:.2f}", f"{megabytes:.1f}", verdict])
    return common.markdown_table(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=BUDGET_PAIRS)
    parser.add_argument("--row-group-rows", type=int, default=4096)
    parser.add_argument("--window-rows", type=int, default=20_000)
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 64, 512])
    return common.arguments_of(parser, rounds=3)


if __name__ == "__main__":
    main()
