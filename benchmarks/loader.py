"""How fast a prepared corpus is loaded, how much of a batch is padding, and how soon a resumed run has its first batch.

    python benchmarks/loader.py                     # 200,000 pairs, three rounds
    python benchmarks/loader.py --pairs 2000000 --json loader.json

Beside it, in the same rounds: Hugging Face `datasets`, streaming row by row over the same parquet files. It hands out
rows as they lie on the disk; ours come shuffled, bucketed by length and padded into tensors.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
from common import (
    Figures,
    Rounds,
    Stopwatch,
    interleaved,
    machine,
    machine_line,
    markdown_table,
    median,
    median_ratio,
    ratio_range,
    write_raw,
)
from synthetic_corpus import BOS_ID, write_corpus

from dist_transformer.data.loader import LaneLoader, MicroBatch, Position, WindowSource
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.window import WindowReader

VOCABULARY = 32_000
SEED = 1
STALL_SECONDS = 300
BUDGET_PAIRS_PER_SECOND = 200_000
BUDGET_PADDING = 0.07
BUDGET_STRAGGLER = 1.05
BUDGET_RESUME_SECONDS = 1.0
BUDGET_WINDOW_ROWS = 20_000
STREAMING = "datasets, streaming, row by row"
Step = list[MicroBatch]


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    found = machine()
    print(machine_line(found), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write_corpus(folder, arguments.pairs, VOCABULARY, arguments.row_group_rows, SEED)
        print(_corpus_line(folder, manifest, arguments), flush=True)
        windows = {rows: _batching(_source(folder, manifest, arguments, rows)) for rows in arguments.windows}
        print("\n" + _batching_table(windows), flush=True)
        source = _source(folder, manifest, arguments, arguments.window_rows)
        throughput = interleaved(_throughput_cases(source, folder, manifest, arguments), arguments.rounds)
        print("\n" + _throughput_table(throughput), flush=True)
        middle = _middle(source)
        resumes = {_workers(n): partial(_first_batch, source, middle, n) for n in (0, 1)}
        resumed = interleaved(resumes, arguments.rounds)
        print("\n" + _resume_table(resumed))
    if arguments.json:
        figures = {"batching": windows, "throughput": throughput, "resume": resumed}
        write_raw(arguments.json, vars(arguments), found, figures)


def _source(folder: Path, manifest: Manifest, arguments: argparse.Namespace, window_rows: int) -> WindowSource:
    groups = tuple(group.rows for group in manifest.splits["train"].row_groups)
    reader = WindowReader(folder, manifest, "train")
    return WindowSource(reader, groups, arguments.lanes, window_rows, arguments.max_tokens, SEED)


def _open(source: WindowSource, position: Position, num_workers: int) -> LaneLoader:
    return LaneLoader(source, range(source.num_lanes), position, BOS_ID, num_workers, STALL_SECONDS)


def _steps(loader: LaneLoader) -> Iterator[Step]:
    """The steps of the rest of this epoch; a lane that has ended is left out."""
    while step := [batch for batch in loader.next_step() if batch is not None]:
        yield step


def _batching(source: WindowSource) -> Figures:
    """Padding and stragglers of one epoch: counts, the same on every machine."""
    tokens, padded, stragglers, widest = 0, 0, [], 0
    for step in _steps(_open(source, Position.start(source.num_lanes), 0)):
        sizes = [batch.shape.padded_tokens for batch in step]
        tokens += sum(batch.shape.source_tokens + batch.shape.target_tokens for batch in step)
        padded += sum(sizes)
        # A lane that has ended waits for the others as one with an empty micro-batch does.
        stragglers.append(max(sizes) * source.num_lanes / sum(sizes))
    plan = source.plan(0)
    for lane in range(source.num_lanes):
        for window in range(plan.num_windows(lane)):
            widest = max(widest, sum(piece.last - piece.first for piece in plan.slices(lane, window)))
    return {
        "rows": widest,
        "padding": 1 - tokens / padded,
        "straggler": mean(stragglers),
        "steps": len(stragglers),
    }


def _throughput_cases(
    source: WindowSource, folder: Path, manifest: Manifest, arguments: argparse.Namespace
) -> dict[str, Callable[[], Figures]]:
    files = [str(folder / shard.file) for shard in manifest.splits["train"].shards]
    return {
        _workers(0): partial(_epoch, source, 0),
        _workers(1): partial(_epoch, source, 1),
        STREAMING: partial(_stream, files, str(folder / "cache"), arguments.streamed_rows),
    }


def _epoch(source: WindowSource, num_workers: int) -> Figures:
    """One epoch between two moments of the same kind: just after its first step, and just after that of the next.

    Both times the first windows of all lanes have just been waited for, so nothing was made ahead before the clock
    began, and the start of the worker process does not count.
    """
    loader = _open(source, Position.start(source.num_lanes), num_workers)
    loader.next_step()
    clock = Stopwatch(with_descendants=num_workers > 0)
    rest = list(map(_size, _steps(loader)))
    loader.start_epoch()
    first = _size([batch for batch in loader.next_step() if batch is not None])
    wall, cpu = clock.read()
    pairs, tokens = (sum(part) for part in zip(*rest, first, strict=True))
    return _rates(pairs, tokens, wall, cpu)


def _size(step: Step) -> tuple[int, int]:
    """(pairs, real tokens of both sides)."""
    shapes = [batch.shape for batch in step]
    return sum(s.rows for s in shapes), sum(s.source_tokens + s.target_tokens for s in shapes)


def _stream(files: list[str], cache: str, num_rows: int) -> Figures:
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
    stream = iter(rows)
    next(stream)
    clock, pairs, tokens = Stopwatch(with_descendants=False), 0, 0
    for row in itertools.islice(stream, num_rows):
        pairs += 1
        tokens += len(row["source"]) + len(row["target"])
    return _rates(pairs, tokens, *clock.read())


def _rates(pairs: int, tokens: int, wall: float, cpu: float) -> Figures:
    return {
        "pairs": pairs,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "pairs_per_second": pairs / wall,
        "pairs_per_cpu_second": pairs / cpu,
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
    }


def _middle(source: WindowSource) -> Position:
    """The position after half of the steps of the first epoch."""
    loader = _open(source, Position.start(source.num_lanes), 0)
    positions = [loader.lane_positions() for _ in _steps(loader)]
    lanes = positions[len(positions) // 2]
    return Position(0, tuple(lanes[lane] for lane in range(source.num_lanes)))


def _first_batch(source: WindowSource, position: Position, num_workers: int) -> Figures:
    """From nothing to the first micro-batch of every lane; the start of a worker process is part of it."""
    clock = Stopwatch(with_descendants=num_workers > 0)
    loader = _open(source, position, num_workers)
    loader.next_step()
    return dict(zip(("wall_seconds", "cpu_seconds"), clock.read(), strict=True))


def _workers(number: int) -> str:
    return "in the training process" if number == 0 else f"{number} worker"


def _corpus_line(folder: Path, manifest: Manifest, arguments: argparse.Namespace) -> str:
    split = manifest.splits["train"]
    tokens = split.source_tokens + split.target_tokens
    size = sum(shard.bytes for shard in split.shards)
    return (
        f"{split.rows:,} pairs, mean {split.source_tokens / split.rows:.1f} + {split.target_tokens / split.rows:.1f} "
        f"tokens, {size / tokens:.2f} bytes a token, row groups of {arguments.row_group_rows:,}; "
        f"{arguments.lanes} lanes, micro-batches of {arguments.max_tokens:,} tokens; medians of rounds: {arguments.rounds}"
    )


def _batching_table(windows: dict[int, Figures]) -> str:
    budget = f"budget at {BUDGET_WINDOW_ROWS:,}: {BUDGET_PADDING:.0%}, {BUDGET_STRAGGLER}"
    header = ["data.window_rows", "rows in a window", "steps", "padding", "straggler ratio", budget]
    rows = []
    for window_rows, found in windows.items():
        kept = found["padding"] <= BUDGET_PADDING and found["straggler"] <= BUDGET_STRAGGLER
        verdict = ("kept" if kept else "missed") if window_rows == BUDGET_WINDOW_ROWS else ""
        numbers = [f"{window_rows:,}", f"{found['rows']:,.0f}", f"{found['steps']:.0f}"]
        rows.append([*numbers, f"{found['padding']:.1%}", f"{found['straggler']:.3f}", verdict])
    return markdown_table(header, rows)


def _throughput_table(rounds: Rounds) -> str:
    budget = f"budget: {BUDGET_PAIRS_PER_SECOND:,} pairs/s, 1 worker"
    header = [
        "loading",
        "pairs/s",
        "pairs/CPU-s",
        "tokens/s",
        "tokens/CPU-s",
        "pairs/CPU-s to datasets",
        "range",
        budget,
    ]
    rows = []
    for name, samples in rounds.items():
        rates = [f"{median(samples, figure):,.0f}" for figure in ("pairs_per_second", "pairs_per_cpu_second")]
        rates += [f"{median(samples, figure):,.0f}" for figure in ("tokens_per_second", "tokens_per_cpu_second")]
        compared: tuple[Any, Any, str] = (samples, rounds[STREAMING], "pairs_per_cpu_second")
        share = median(samples, "pairs_per_second") / BUDGET_PAIRS_PER_SECOND
        verdict = f"{share:.0%} of it" if name == _workers(1) else ""
        rows.append([name, *rates, f"{median_ratio(*compared):.1f}", ratio_range(*compared), verdict])
    return markdown_table(header, rows)


def _resume_table(rounds: Rounds) -> str:
    header = ["first batch after a resume", "seconds", "CPU-seconds", f"budget: {BUDGET_RESUME_SECONDS:g} s"]
    rows = []
    for name, samples in rounds.items():
        wall = median(samples, "wall_seconds")
        verdict = "kept" if wall <= BUDGET_RESUME_SECONDS else "missed"
        rows.append([name, f"{wall:.2f}", f"{median(samples, 'cpu_seconds'):.2f}", verdict])
    return markdown_table(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch, padding counted")
    parser.add_argument("--row-group-rows", type=int, default=4096)
    parser.add_argument("--windows", type=int, nargs="+", default=[5_000, 20_000, 50_000], help="rows, for the padding")
    parser.add_argument("--window-rows", type=int, default=20_000, help="rows, for speed and resume")
    parser.add_argument("--streamed-rows", type=int, default=20_000, help="rows that `datasets` streams in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all figures of all rounds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
