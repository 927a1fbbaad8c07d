"""Speed of loading a corpus, share of padding in a batch, and time to the first batch of a resumed run.

    python benchmarks/loader.py                     # 200,000 pairs, three rounds
    python benchmarks/loader.py --pairs 2000000 --json loader.json --peers litdata

Beside it, in the same rounds, other loaders yield the same rows one by one (loader_peers.py); ours are shuffled,
bucketed by length and padded into tensors.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import common
import loader_peers
from common import Figures, Rounds, Stopwatch
from synthetic_corpus import Corpus, write_tokens
from synthetic_text import prepare_text

from dist_transformer.data.loader.batching import straggler_ratio
from dist_transformer.data.loader.loader import LaneLoader, MicroBatch
from dist_transformer.data.loader.position import Position
from dist_transformer.training.run_data import RunData

VOCABULARY = 32_000
TEXT_VOCABULARY = 8_000
PREPARED, ON_THE_FLY = "prepared", "BPE on the fly"
IN_PROCESS, ONE_WORKER = "in the training process", "1 worker"
DATASETS = "datasets, rows streamed in the training process"
LITDATA = "litdata, rows shuffled,"
BUDGET_PAIRS_PER_SECOND = {f"{PREPARED}, {ONE_WORKER}": 200_000, f"{ON_THE_FLY}, {ONE_WORKER}": 9_000}
BUDGET_PADDING = 0.07
BUDGET_STRAGGLER = 1.05
BUDGET_RESUME_SECONDS = 1.0
BUDGET_WINDOW_ROWS = 20_000
Step = list[MicroBatch]


def main() -> None:
    arguments = _arguments()
    found = common.begin(threads=1)
    with tempfile.TemporaryDirectory() as name:
        prepared = write_tokens(Path(name) / "tokens", arguments.pairs, VOCABULARY, arguments.row_group_rows)
        (Path(name) / "text").mkdir()
        text = prepare_text(
            Path(name) / "text", arguments.text_pairs, arguments.text_vocabulary, arguments.row_group_rows
        )
        print(_corpora_line(prepared, text, arguments), flush=True)
        batching = _batching_figures(prepared, arguments)
        print("\n" + _batching_table(batching), flush=True)
        runs = {PREPARED: _run_data(prepared, arguments), ON_THE_FLY: _run_data(text, arguments)}
        throughput = common.interleaved(_throughput_cases(runs, prepared, arguments), arguments.rounds)
        print("\n" + _throughput_table(throughput), flush=True)
        resumed = common.interleaved(_resume_cases(runs), arguments.rounds)
        print("\n" + _resume_table(resumed))
    common.finish(arguments, found, {"batching": batching, "throughput": throughput, "resume": resumed})


def _run_data(corpus: Corpus, arguments: argparse.Namespace) -> RunData:
    return corpus.run_data(arguments.lanes, arguments.max_tokens, arguments.window_rows)


def _open(run: RunData, position: Position, num_workers: int) -> LaneLoader:
    return run.loader(position, 0, 0, 1, num_workers)


def epoch_steps(run: RunData) -> Iterator[Step]:
    """Yields the steps of the first epoch, built in this process."""
    return _steps(_open(run, run.start(), 0))


def _steps(loader: LaneLoader) -> Iterator[Step]:
    """Yields the steps of the rest of this epoch, without lanes that have ended."""
    while step := [batch for batch in loader.next_step().batches if batch is not None]:
        yield step


def _batching_figures(corpus: Corpus, arguments: argparse.Namespace) -> dict[str, Figures]:
    """Returns padding and stragglers of one epoch, by window: counts, the same on every machine."""
    lanes, max_tokens = arguments.lanes, arguments.max_tokens
    return {str(rows): _padded(corpus.run_data(lanes, max_tokens, rows)) for rows in arguments.windows}


def _padded(run: RunData) -> Figures:
    tokens, padded, stragglers, shapes = 0, 0, [], set()
    for step in epoch_steps(run):
        sizes = [batch.shape.padded_tokens for batch in step]
        tokens += sum(batch.shape.source_tokens + batch.shape.target_tokens for batch in step)
        padded += sum(sizes)
        shapes |= {(b.shape.rows, b.shape.source_length, b.shape.target_length) for b in step}
        stragglers.append(straggler_ratio(sizes))
    return {
        "padding": 1 - tokens / padded,
        "straggler": mean(stragglers),
        "steps": len(stragglers),
        "shapes": len(shapes),
    }


def _throughput_cases(
    runs: dict[str, RunData], prepared: Corpus, arguments: argparse.Namespace
) -> dict[str, Callable[[], Figures]]:
    files = [str(prepared.folder / shard.file) for shard in prepared.split.shards]
    peer_rows = min(arguments.peer_rows, arguments.pairs // 2)
    cases: dict[str, Callable[[], Figures]] = {
        f"{PREPARED}, {IN_PROCESS}": partial(_epoch, runs[PREPARED], 0),
        f"{PREPARED}, {ONE_WORKER}": partial(_epoch, runs[PREPARED], 1),
        f"{ON_THE_FLY}, {ONE_WORKER}": partial(_epoch, runs[ON_THE_FLY], 1),
        DATASETS: partial(loader_peers.datasets_rows, files, prepared.folder / "cache", peer_rows),
    }
    if "litdata" in arguments.peers:
        folder = prepared.folder / "litdata"
        loader_peers.write_litdata(files, folder)
        cases[f"{LITDATA} {IN_PROCESS}"] = partial(loader_peers.litdata_rows, folder, peer_rows, 0)
        cases[f"{LITDATA} {ONE_WORKER}"] = partial(loader_peers.litdata_rows, folder, peer_rows, 1)
    return cases


def _epoch(run: RunData, num_workers: int) -> Figures:
    """Measures the second epoch, from just after its first step to just after the first step of the third.

    Both times the first windows of all lanes have just come from the worker, so none was built ahead before the clock
    began; the worker's start, and the windows that the loader builds itself meanwhile, are part of the first epoch.
    """
    loader = _open(run, run.start(), num_workers)
    num_steps = sum(1 for _ in _steps(loader))
    loader.start_epoch(num_steps)
    loader.next_step()
    clock = Stopwatch(with_descendants=num_workers > 0)
    rest = list(map(_size, _steps(loader)))
    loader.start_epoch(2 * num_steps)
    first = _size([batch for batch in loader.next_step().batches if batch is not None])
    wall, cpu = clock.read()
    pairs, tokens = (sum(part) for part in zip(*rest, first, strict=True))
    return common.rates(pairs, tokens, wall, cpu)


def _size(step: Step) -> tuple[int, int]:
    """Returns (pairs, real tokens of both sides)."""
    shapes = [batch.shape for batch in step]
    return sum(s.pairs for s in shapes), sum(s.source_tokens + s.target_tokens for s in shapes)


def _resume_cases(runs: dict[str, RunData]) -> dict[str, Callable[[], Figures]]:
    middles = {name: _middle(run) for name, run in runs.items()}
    return {
        f"{name}, {workers}": partial(_first_batch, runs[name], middles[name], number)
        for name in runs
        for number, workers in enumerate((IN_PROCESS, ONE_WORKER))
    }


def _middle(run: RunData) -> Position:
    """Returns the position after half of the steps of the first epoch."""
    loader = _open(run, run.start(), 0)
    positions = [loader.lane_positions() for _ in _steps(loader)]
    lanes = positions[len(positions) // 2]
    return Position(loader.partition, tuple(lanes[lane] for lane in sorted(lanes)))


def _first_batch(run: RunData, position: Position, num_workers: int) -> Figures:
    """Measures from no loader to the first micro-batch of every lane."""
    clock = Stopwatch(with_descendants=num_workers > 0)
    loader = _open(run, position, num_workers)
    loader.next_step()
    return dict(zip(("wall_seconds", "cpu_seconds"), clock.read(), strict=True))


def _corpora_line(prepared: Corpus, text: Corpus, arguments: argparse.Namespace) -> str:
    split = prepared.split
    tokens = split.source_tokens + split.target_tokens
    size = sum(shard.bytes for shard in split.shards)
    return (
        f"Prepared: {split.rows:,} pairs, mean {split.source_tokens / split.rows:.1f} + "
        f"{split.target_tokens / split.rows:.1f} tokens, {size / tokens:.2f} bytes a token; text: {text.split.rows:,} pairs; "
        f"row groups of {arguments.row_group_rows:,}; {arguments.lanes} lanes, micro-batches of {arguments.max_tokens:,} "
        f"tokens, windows of {arguments.window_rows:,} but for the first table; medians of rounds: {arguments.rounds}"
    )


def _batching_table(figures: dict[str, Figures]) -> str:
    budget = f"budget at {BUDGET_WINDOW_ROWS:,}: padding 7%, straggler {BUDGET_STRAGGLER}"
    header = ["data.window_rows", "steps", "shapes", "padding", "straggler ratio", budget]
    rows = []
    for window_rows, found in figures.items():
        numbers = [f"{int(window_rows):,}", f"{found['steps']:.0f}", f"{found['shapes']:.0f}"]
        ratios = [f"{found['padding']:.1%}", f"{found['straggler']:.3f}"]
        rows.append([*numbers, *ratios, _batching_verdict(found) if int(window_rows) == BUDGET_WINDOW_ROWS else ""])
    return common.markdown_table(header, rows)


def _batching_verdict(found: Figures) -> str:
    kept = found["padding"] <= BUDGET_PADDING and found["straggler"] <= BUDGET_STRAGGLER
    return "kept" if kept else "missed"


def _throughput_table(rounds: Rounds) -> str:
    names = ("pairs_per_second", "pairs_per_cpu_second", "tokens_per_second", "tokens_per_cpu_second")
    header = ["loading", "pairs/s", "pairs/CPU-s", "tokens/s", "tokens/CPU-s"]
    header += ["tokens/CPU-s to datasets", "range", "budget, pairs/s"]
    rows = []
    for name, samples in rounds.items():
        figures = [f"{common.median(samples, figure):,.0f}" for figure in names]
        reference = rounds[DATASETS]
        ratio = common.median_ratio(samples, reference, "tokens_per_cpu_second")
        spread = common.ratio_range(samples, reference, "tokens_per_cpu_second")
        budget = BUDGET_PAIRS_PER_SECOND.get(name)
        share = f"{budget:,}: {common.median(samples, 'pairs_per_second') / budget:.0%} of it" if budget else ""
        rows.append([name, *figures, f"{ratio:.1f}", spread, share])
    return common.markdown_table(header, rows)


def _resume_table(rounds: Rounds) -> str:
    header = ["first batch after a resume", "seconds", "CPU-seconds", f"budget, prepared: {BUDGET_RESUME_SECONDS:g} s"]
    rows = []
    for name, samples in rounds.items():
        wall = common.median(samples, "wall_seconds")
        verdict = ("kept" if wall <= BUDGET_RESUME_SECONDS else "missed") if name.startswith(PREPARED) else ""
        rows.append([name, f"{wall:.2f}", f"{common.median(samples, 'cpu_seconds'):.2f}", verdict])
    return common.markdown_table(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--text-pairs", type=int, default=40_000, help="pairs tokenized on the fly")
    parser.add_argument("--text-vocabulary", type=int, default=TEXT_VOCABULARY)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--row-group-rows", type=int, default=4096)
    parser.add_argument("--windows", type=int, nargs="+", default=[5_000, 20_000, 50_000, 100_000], help="to compare")
    parser.add_argument("--window-rows", type=int, default=20_000, help="rows, for speed and resume")
    parser.add_argument(
        "--peer-rows", type=int, default=20_000, help="most rows that another loader hands out in a round"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=("litdata",), default=["litdata"] if loader_peers.has_litdata() else []
    )
    return common.arguments_of(parser, rounds=3)


if __name__ == "__main__":
    main()
