"""Two gloo ranks against one rank with two threads: real target tokens per second on the same global batches.

    python benchmarks/ranks.py                          # ZeRO 0 to 3, `small`, vocabulary 8000, fp32
    python benchmarks/ranks.py --stages 1 --rounds 3

It needs a machine with as many free cores as ranks. All sides train on the same global batches, of as many lanes as
there are ranks: two ranks on one lane each, a single rank on both, one after the other. Each side is a group of
processes that is started once for a stage and sleeps while another side works. A step is that of training: the
prefetched batch with its all-reduce, forward and backward pass of each lane, DeepSpeed's collectives, the update.
"""

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import Figures, Rounds, Stopwatch
from synthetic_corpus import PAD_ID, SEED, TRAINING, Corpus, write_tokens

from dist_transformer.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.processes.launching import rank_environment
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective, inputs_of
from dist_transformer.training.global_batch import GlobalBatchPrefetcher, RankStatus
from dist_transformer.training.train_state import dropout_seed

MEMBER = "--as-rank"
BUDGET = 0.9
LEARNING_RATE = 1e-4
IDLE = RankStatus(wants_stop=False, is_writing=False, loss_sum=0.0)
PARTS = ("forward and backward", "update", "feed")


class Group:
    """The processes of one side, which compute steps together on request.

    Args:
        settings: what each of them gets to know, from `settings_of`.
        place: how a rank is started elsewhere than here: the words before its command, and environment variables.
    """

    def __init__(
        self,
        num_ranks: int,
        settings: Mapping[str, Any],
        place: Callable[[int], tuple[list[str], dict[str, str]]] = lambda rank: ([], {}),
    ) -> None:
        command, port = [sys.executable, str(Path(__file__)), MEMBER, json.dumps(settings)], _free_port()
        self._processes = []
        for rank in range(num_ranks):
            before, variables = place(rank)
            threads = {"OMP_NUM_THREADS": str(settings["threads"])}
            environment = {**os.environ, **rank_environment(rank, num_ranks, port), **threads, **variables}
            process = subprocess.Popen(
                [*before, *command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._processes.append(process)

    def take(self, steps: int) -> Figures:
        """Returns wall seconds of the slowest rank and of its parts of the steps, and CPU-seconds of all ranks."""
        self.start(steps)
        return self.answer()

    def start(self, steps: int) -> None:
        for process in self._processes:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)

    def answer(self) -> Figures:
        answers = [_answer(process) for process in self._processes]
        figures = max(answers, key=lambda answer: answer["wall_seconds"])
        cpu, tokens = sum(answer["cpu_seconds"] for answer in answers), figures["target_tokens"]
        rates = {"tokens_per_second": tokens / figures["wall_seconds"], "tokens_per_cpu_second": tokens / cpu}
        return {**figures, "cpu_seconds": cpu, **rates}

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def main() -> None:
    if sys.argv[1:2] == [MEMBER]:
        _be_a_rank(json.loads(sys.argv[2]))
        return
    arguments = _arguments()
    found = common.begin(1)
    rounds = {}
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name), arguments.pairs, arguments.vocabulary, 4096)
        for stage in arguments.stages:
            rounds[f"ZeRO {stage}"] = _stage(stage, Path(name), arguments)
            print(f"ZeRO {stage}: done", file=sys.stderr)
    print(_description(arguments, rounds) + "\n\n" + _table(rounds, arguments.ranks))
    common.finish(arguments, found, rounds)


def _stage(stage: int, folder: Path, arguments: argparse.Namespace) -> Rounds:
    sides = {_name(n, t): (n, t) for n, t in ((arguments.ranks, 1), (1, arguments.ranks), (1, 1))}
    with ExitStack() as stack:
        cases: dict[str, Callable[[], Figures]] = {}
        for name, (num_ranks, threads) in sides.items():
            group = Group(num_ranks, settings_of(arguments, stage, arguments.ranks, folder, threads))
            stack.callback(group.end)
            group.take(1)  # warms up: allocates memory that is reused
            cases[name] = partial(group.take, arguments.steps)
        return common.interleaved(cases, arguments.rounds)


def settings_of(arguments: argparse.Namespace, stage: int, lanes: int, folder: Path, threads: int) -> dict[str, Any]:
    """Returns what a rank gets to know, on the corpus in `folder`."""
    given = ("preset", "vocabulary", "max_tokens", "precision", "communication_dtype", "pairs")
    settings = {name: getattr(arguments, name) for name in given}
    return settings | {"stage": stage, "threads": threads, "lanes": lanes, "folder": str(folder)}


def _be_a_rank(settings: dict[str, Any]) -> None:
    """Reads numbers of steps from standard input, and prints the figures of those steps, a line of JSON each."""
    torch.set_num_threads(settings["threads"])
    logging.disable(logging.WARNING)
    ranks = group.join(600)
    folder, lanes = Path(settings["folder"]), settings["lanes"]
    torch.manual_seed(SEED)
    model = Transformer(ModelConfig(preset=settings["preset"]), settings["vocabulary"], settings["vocabulary"], PAD_ID)
    kinds = {name: settings[name] for name in ("precision", "communication_dtype")}
    training = TrainingConfig(zero_stage=settings["stage"], same_bits=settings.get("same_bits", False), **kinds)
    objective = Objective(model.to(ranks.device), training.label_smoothing, training.precision)
    engine = Engine(objective, training, OptimizerConfig(), ranks)
    engine.train()
    data = Corpus(folder, Manifest.load(folder)).run_data(lanes, settings["max_tokens"], settings["pairs"] // 2)
    loader = data.loader(data.start(), 0, ranks.rank, ranks.num_ranks, 0)
    batches = GlobalBatchPrefetcher(loader, ranks, (TRAINING,), lanes, 0)
    batches.prefetch(IDLE)
    done = 0
    for line in sys.stdin:
        print(json.dumps(_steps(engine, batches, ranks, range(done, done + int(line)))), flush=True)
        done += int(line)
    group.leave()


def _steps(engine: Engine, batches: GlobalBatchPrefetcher, ranks: Ranks, numbers: range) -> Figures:
    """Computes steps like the training loop, without its log. Returns wall seconds of their parts."""
    figures, total = dict.fromkeys((*PARTS, "target_tokens"), 0.0), Stopwatch(with_descendants=False)
    for number in numbers:
        clock = Stopwatch(with_descendants=False)
        batch = batches.next()
        batches.prefetch(IDLE)
        figures["feed"] += clock.read()[0]
        clock = Stopwatch(with_descendants=False)
        last = len(batch.micro_batches) - 1
        for slot, micro_batch in enumerate(batch.micro_batches):
            assert micro_batch is not None
            torch.manual_seed(dropout_seed(SEED, number, micro_batch.lane))
            loss, _ = engine(*inputs_of([micro_batch], ranks.device))
            engine.backward(loss, batch.target_tokens, is_last=slot == last)
        figures["forward and backward"] += clock.read()[0]
        clock = Stopwatch(with_descendants=False)
        engine.step(LEARNING_RATE)
        figures["update"] += clock.read()[0]
        figures["target_tokens"] += batch.target_tokens
    wall, cpu = total.read()
    return {**figures, "wall_seconds": wall, "cpu_seconds": cpu}


def _answer(process: "subprocess.Popen[str]") -> Figures:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            figures: Figures = json.loads(line)
            return figures
    sys.exit(f"a rank has ended with exit code {process.wait()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _name(num_ranks: int, threads: int) -> str:
    return f"{num_ranks} rank{'s'[: num_ranks > 1]}, {threads} thread{'s'[: threads > 1]}"


def _description(arguments: argparse.Namespace, rounds: dict[str, Rounds]) -> str:
    tokens = [sample["target_tokens"] for sides in rounds.values() for sample in next(iter(sides.values()))]
    return (
        f"\n`{arguments.preset}`, vocabulary {arguments.vocabulary:,}, {arguments.precision}; {arguments.ranks} lanes of at most "
        f"{arguments.max_tokens:,} tokens, {sum(tokens) / len(tokens) / arguments.steps:,.0f} real target tokens a step; "
        f"steps a round: {arguments.steps}; medians of rounds: {arguments.rounds}"
    )


def _table(rounds: dict[str, Rounds], num_ranks: int) -> str:
    names = [_name(num_ranks, 1), _name(1, num_ranks), _name(1, 1)]
    header = ["stage", *(f"tokens/s: {name}" for name in names), f"{names[0]} to {names[1]}", "range", "per CPU-second"]
    header += [f"of {names[0]}: {part}" for part in PARTS] + [f"budget {BUDGET}"]
    rows = []
    for stage, sides in rounds.items():
        ours, reference = sides[names[0]], sides[names[1]]
        rates = [f"{common.median(sides[name], 'tokens_per_second'):,.0f}" for name in names]
        ratio = common.median_ratio(ours, reference, "tokens_per_second")
        per_cpu = common.median_ratio(ours, reference, "tokens_per_cpu_second")
        spread = common.ratio_range(ours, reference, "tokens_per_second")
        shares = [f"{common.median(ours, part) / common.median(ours, 'wall_seconds'):.1%}" for part in PARTS]
        verdict = "kept" if ratio >= BUDGET else "missed"
        rows.append([stage, *rates, f"{ratio:.2f}", spread, f"{per_cpu:.2f}", *shares, verdict])
    return common.markdown_table(header, rows)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of what is trained."""
    parser.add_argument("--preset", choices=("tiny", "small", "base", "big"), default="small")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a lane in a step: both sides, padding counted")
    parser.add_argument("--pairs", type=int, default=40_000, help="of the corpus; a window has half of them")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--communication-dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 1, 2, 3])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2, help="and threads of the single rank")
    parser.add_argument("--steps", type=int, default=3, help="of each side in a round")
    return common.arguments_of(parser, rounds=5)


if __name__ == "__main__":
    main()
