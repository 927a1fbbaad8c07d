"""Training speed on a CPU beside the toolkits that still install: same text, vocabulary, model, batch tokens and threads.

    python benchmarks/peers/race.py --work /tmp/race --install-only      # virtual environments: some GB, some minutes
    python benchmarks/peers/race.py --work /tmp/race --json race.json --plot losses.png

Every trainer runs as its user starts it and is timed from outside. Runs take turns, round by round. Then each runs once
more for the loss over its first steps, so that speed that comes from wrong work would show.
"""

import argparse
import csv
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what all benchmarks share

import common
from common import Figures, Rounds
from corpus import Corpus, invented_pairs, read_pairs, write_corpus
from environments import NotInstalled, frozen, python_of
from loops import OURS, PEERS
from measure import Failed, Reading, run, speed
from protocol import DROPOUT, LABEL_SMOOTHING, Task
from toolkits import TOOLKITS

from dist_transformer.config.schema import PRESETS

ALL = {peer.name: peer for peer in (*PEERS, *TOOLKITS)}
BUDGETS = {"Marian": 1.0}
PYTHON_BUDGET = 1.3
WARMUP_STEPS = 5
"""Not timed: the first batches, kernels that are chosen, memory that is taken."""
SHOWN = ("tokens_per_cpu_second", "tokens_per_second", "tokens_per_step", "start_cpu_seconds")


def main() -> None:
    arguments = _arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    pythons, problems = _installed(arguments)
    if arguments.install_only:
        return
    found = common.begin(arguments.threads)
    corpus = _corpus(arguments)
    print(_description(arguments, corpus), flush=True)
    race = Race(arguments, corpus, pythons, problems)
    rounds = race.speeds()
    print("\n" + _table(rounds, problems), flush=True)
    losses = race.losses() if arguments.loss_steps else {}
    if losses:
        print("\n" + _loss_table(losses), flush=True)
        _write_losses(losses, arguments.plot)
    versions = {name: frozen(python) for name, python in pythons.items()}
    common.finish(
        arguments,
        found,
        {
            "speeds": rounds,
            "losses": losses,
            "problems": problems,
            "packages": versions,
            "pairs": corpus.num_pairs,
            "target_tokens": corpus.target_tokens,
        },
    )


class Race:
    """Runs of the trainers that are installed; one that fails once is out, and `problems` says why."""

    def __init__(
        self, arguments: argparse.Namespace, corpus: Corpus, pythons: dict[str, Path], problems: dict[str, str]
    ) -> None:
        self._arguments, self._corpus = arguments, corpus
        self._pythons, self._problems = pythons, problems

    def speeds(self) -> Rounds:
        """Figures of each trainer, one for each round; of the rounds that all who finished have run."""
        names, rounds = list(self._pythons), {name: [] for name in self._pythons}
        for number in range(self._arguments.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                readings = self._run(name, f"round {number + 1}", self._arguments.steps)
                if readings:
                    rounds[name].append(speed(readings, WARMUP_STEPS))
                    _progress(f"  {rounds[name][-1]['tokens_per_cpu_second']:,.0f} tokens/CPU-s")
        return {name: samples for name, samples in rounds.items() if name not in self._problems}

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """(step, loss per target token) of each trainer."""
        runs = {name: self._run(name, "losses", self._arguments.loss_steps) for name in self._pythons}
        return {name: [(r.mark.step, r.mark.loss) for r in readings] for name, readings in runs.items() if readings}

    def _run(self, name: str, what: str, last_step: int) -> list[Reading]:
        arguments = self._arguments
        if name in self._problems:
            return []
        _progress(f"{what}: {name}")
        folder = arguments.work / "runs" / f"{name} {what}".replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        sizes = PRESETS[arguments.model]
        task = Task(
            folder, self._corpus, sizes, arguments.tokens, last_step, arguments.steps_per_mark, arguments.threads
        )
        try:
            return run(ALL[name], self._pythons[name], task)
        except Failed as problem:
            self._problems[name] = "failed: " + str(problem).strip().splitlines()[-1]
            _progress(f"{name} failed:\n{problem}")
            return []


def _installed(arguments: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    pythons, problems = {}, {}
    for name in dict.fromkeys((OURS, *arguments.peers)):
        try:
            pythons[name] = python_of(ALL[name], arguments.work)
        except NotInstalled as problem:
            problems[name] = f"not installed: {problem}"
            print(f"{name}: {problems[name]}", flush=True)
    return pythons, problems


def _corpus(arguments: argparse.Namespace) -> Corpus:
    folder = arguments.work / "corpus"
    shutil.rmtree(folder, ignore_errors=True)
    if arguments.source:
        pairs = read_pairs(arguments.source, arguments.target, arguments.pairs)
    else:
        pairs = invented_pairs(arguments.pairs)
    return write_corpus(folder, pairs, arguments.vocabulary)


def _description(arguments: argparse.Namespace, corpus: Corpus) -> str:
    text = f"{arguments.source} and {arguments.target}" if arguments.source else "invented text"
    return (
        f"`{arguments.model}`, vocabulary {arguments.vocabulary:,}, fp32, label smoothing {LABEL_SMOOTHING}, dropout "
        f"{DROPOUT}; threads: {arguments.threads}; {text}: {corpus.num_pairs:,} pairs, {corpus.target_tokens:,} target "
        f"tokens; timed: steps {WARMUP_STEPS} to {arguments.steps}; rounds: {arguments.rounds}"
    )


def _table(rounds: Rounds, problems: dict[str, str]) -> str:
    header = [
        "trainer", "tokens/CPU-s", "range", "ours to it", "range", "tokens/s", "ours to it", "tokens a step",
        "start, CPU-s", "budget", "differs",
    ]  # fmt: skip
    rows = []
    by_speed = sorted(rounds, key=lambda name: -common.median(rounds[name], "tokens_per_cpu_second"))
    for name in by_speed:
        samples, ours = rounds[name], rounds.get(OURS, [])
        rate, wall, per_step, start = (f"{common.median(samples, figure):,.0f}" for figure in SHOWN)
        rows.append(
            [
                name, rate, _range(samples), *_ratio(ours, samples, SHOWN[0]), wall, *_ratio(ours, samples, SHOWN[1])[:1],
                per_step, start, _verdict(name, samples, ours), ALL[name].differs,
            ]
        )  # fmt: skip
    rows += [[name, problem, *[""] * (len(header) - 2)] for name, problem in problems.items()]
    return common.markdown_table(header, rows)


def _ratio(ours: list[Figures], samples: list[Figures], figure: str) -> tuple[str, str]:
    """Median and range of the rounds' ratios of ours to it."""
    if not ours:
        return "", ""
    return f"{common.median_ratio(ours, samples, figure):.2f}", common.ratio_range(ours, samples, figure)


def _range(samples: list[Figures]) -> str:
    rates = [sample["tokens_per_cpu_second"] for sample in samples]
    return f"{min(rates):,.0f} to {max(rates):,.0f}"


def _verdict(name: str, samples: list[Figures], ours: list[Figures]) -> str:
    if name == OURS or not ours:
        return ""
    budget = BUDGETS.get(name, PYTHON_BUDGET)
    is_met = common.median_ratio(ours, samples, "tokens_per_cpu_second") >= budget
    return f"{budget}: {'met' if is_met else 'missed'}"


def _loss_table(losses: dict[str, list[tuple[int, float]]]) -> str:
    last = max(step for points in losses.values() for step, _ in points)
    steps = sorted({5, 10, 20, 50, 100, 150, 200, last})
    found = {name: dict(points) for name, points in losses.items()}
    steps = [step for step in steps if any(step in points for points in found.values())]
    rows = [[name, *(f"{points[s]:.3f}" if s in points else "" for s in steps)] for name, points in found.items()]
    return common.markdown_table(["label-smoothed loss per target token, step", *map(str, steps)], rows)


def _write_losses(losses: dict[str, list[tuple[int, float]]], plot: Path | None) -> None:
    if plot is None:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for name, points in losses.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=2.5 if name == OURS else 1.2)
    axes.set(xlabel="step", ylabel="label-smoothed loss per target token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(plot, dpi=110)
    with plot.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["trainer", "step", "loss"])
        writer.writerows([name, step, f"{loss:.4f}"] for name, points in losses.items() for step, loss in points)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, corpus and runs")
    names = [name for name in ALL if name != OURS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--install-only", action="store_true", help="make the environments, and stop")
    parser.add_argument("--model", choices=tuple(PRESETS), default="small")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--source", type=Path, help="text, one sentence a line, instead of the invented one")
    parser.add_argument("--target", type=Path, help="its translation")
    parser.add_argument("--pairs", type=int, default=30_000, help="how many pairs of it")
    parser.add_argument("--tokens", type=int, default=2048, help="real target tokens a step to come close to")
    parser.add_argument("--steps", type=int, default=40, help=f"of a timed run, the first {WARMUP_STEPS} not timed")
    parser.add_argument("--steps-per-mark", type=int, default=5, help="between two lines of each trainer's log")
    parser.add_argument("--loss-steps", type=int, default=200, help="of the run for the losses; 0: none")
    parser.add_argument("--plot", type=Path, help="picture of the losses; a .csv beside it")
    parser.add_argument("--threads", type=int, default=1)
    arguments = common.arguments_of(parser, rounds=3)
    arguments.work = arguments.work.absolute()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than the {WARMUP_STEPS} that are not timed")
    if (arguments.source is None) != (arguments.target is None):
        parser.error("--source and --target go together")
    return arguments


if __name__ == "__main__":
    main()
