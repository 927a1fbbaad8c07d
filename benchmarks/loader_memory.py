"""Memory of the loader over an epoch: the training process and its loader processes, as a plot and in figures.

    python benchmarks/loader_memory.py --plot loader-memory.png   # 5,000,000 pairs: some minutes, 0.7 GB of disk

An epoch is loaded at full speed without training on it. A process's memory is its proportional set size: pages shared
by several processes count for each of them in part, so the sum is the memory really used.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import common
import psutil
from common import Figures
from matplotlib.figure import Figure
from synthetic_corpus import Corpus, write_tokens

from dist_transformer.training.run_data import RunData

VOCABULARY = 32_000
NUM_SAMPLES = 100
Samples = list[Figures]


def main() -> None:
    arguments = _arguments()
    found = common.begin(threads=1)
    with tempfile.TemporaryDirectory() as name:
        corpus = write_tokens(Path(name), arguments.pairs, VOCABULARY, arguments.row_group_rows)
        cases: dict[str, Callable[[], Samples]] = {
            f"{workers} worker" + "s" * (workers > 1): partial(_epoch, _run_data(corpus, arguments), workers)
            for workers in arguments.workers
        }
        samples = {name: case() for name, case in cases.items()}
    print(
        f"{arguments.pairs:,} pairs; {arguments.lanes} lanes, micro-batches of {arguments.max_tokens:,} tokens, windows of "
        f"at most {arguments.window_rows:,} pairs; {NUM_SAMPLES} samples of proportional set sizes over the epoch"
    )
    print("\n" + _table(samples))
    _plot(samples, arguments.plot)
    common.finish(arguments, found, {"memory": samples})


def _run_data(corpus: Corpus, arguments: argparse.Namespace) -> RunData:
    return corpus.run_data(arguments.lanes, arguments.max_tokens, arguments.window_rows)


def _epoch(run: RunData, num_workers: int) -> Samples:
    """Measures memory at the start of an epoch and after each hundredth of it."""
    loader, pairs, samples = run.loader(run.start(), 0, 0, 1, num_workers), 0, []
    step_pairs = sum(run.planner.rows) / NUM_SAMPLES
    while step := [batch for batch in loader.next_step().batches if batch is not None]:
        if pairs >= len(samples) * step_pairs:
            samples.append({"pairs": pairs, **_megabytes()})
        pairs += sum(batch.shape.pairs for batch in step)
    return [*samples, {"pairs": pairs, **_megabytes()}]


def _megabytes() -> Figures:
    here = psutil.Process()
    return {
        "trainer": _proportional_set_megabytes([here]),
        "workers": _proportional_set_megabytes(here.children(recursive=True)),
    }


def _proportional_set_megabytes(processes: list[psutil.Process]) -> float:
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def _table(samples: dict[str, Samples]) -> str:
    """Returns a table; growth is from the second quarter of the epoch, when all buffers are filled, to the last."""
    header = ["loader", "process", "mean, MB", "largest, MB", "last quarter to second, MB", "in per cent"]
    rows = []
    for name, series in samples.items():
        for process in ("trainer", "workers"):
            sizes = [sample[process] for sample in series]
            quarter = len(sizes) // 4
            second, last = mean(sizes[quarter : 2 * quarter]), mean(sizes[-quarter:])
            if last:
                growth = [f"{last - second:+.1f}", f"{last / second - 1:+.1%}"]
                rows.append([name, process, f"{mean(sizes):.0f}", f"{max(sizes):.0f}", *growth])
    return common.markdown_table(header, rows)


def _plot(samples: dict[str, Samples], path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, label, megabytes in _lines(samples):
        axes.plot([sample["pairs"] / 1e6 for sample in samples[name]], megabytes, label=label)
    axes.set(xlabel="million pairs loaded", ylabel="proportional set size, MB", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


def _lines(samples: dict[str, Samples]) -> Iterator[tuple[str, str, list[float]]]:
    for name, series in samples.items():
        for process, label in (("trainer", "training process"), ("workers", "loader processes")):
            if any(sample[process] for sample in series):
                yield name, f"{label}, {name}", [sample[process] for sample in series]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--window-rows", type=int, default=20_000)
    parser.add_argument("--row-group-rows", type=int, default=4096)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="loader processes; an epoch for each")
    parser.add_argument("--plot", type=Path, default=Path("loader-memory.png"), help="file for the picture")
    return common.arguments_of(parser, rounds=1)


if __name__ == "__main__":
    main()
