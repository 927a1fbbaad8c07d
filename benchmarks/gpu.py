"""Training on one GPU: real target tokens per second, MFU, memory and the gain of each lever; ten minutes on an H200.

    python benchmarks/gpu.py --acceptance               # writes benchmarks/results/<date>-gpu-acceptance.md
    python benchmarks/gpu.py                            # writes benchmarks/results/<date>-gpu.md
    python benchmarks/gpu.py --presets big --precisions fp16 --seconds 200
    python benchmarks/gpu.py --device cpu --presets tiny --vocabulary 500 --max-tokens 256 --batches 2 --output gpu.md

Measured are `base` and `big` in fp16 and bf16 with default settings, then each lever alone in bf16, the largest model
first. A case is a process of its own with a time limit: the table also has a row for each case that fails, takes too
long or is not reached in time. Without a GPU the file says "not measured".

A step is that of the training loop: a micro-batch from the loader, copied to the GPU, forward and backward pass,
update, the loss read. The corpus is synthetic, of random ids with lengths like those of English-German news.

With --acceptance, tests that need a GPU come before the measurements (acceptance.py), in the same ten minutes.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from acceptance import Failed, Part, accept
from common import Figures
from synthetic_corpus import PAD_ID, SEED, Corpus, write_tokens

from dist_transformer.config.schema import Config, ModelConfig, OptimizerConfig, TrainingConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Fetched, Ranks
from dist_transformer.model import gpu_kernels
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning.activations import Shape
from dist_transformer.planning.flops import model_flops, published_flops
from dist_transformer.planning.memory import memory_of_rank
from dist_transformer.planning.vocabularies import with_vocabularies
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective, inputs_of
from dist_transformer.training.train_state import dropout_seed, seed_dropout

CASE = "--as-case"
AS_TRAINED = "as trained"
MORE_TOKENS = "3 times the tokens in a micro-batch"
MOST_TOKENS = "6 times the tokens in a micro-batch"
APART = "3 lanes a step, one by one"
JOINED = "3 lanes a step, in one pass"
STAGE_0 = "ZeRO 0"
PADDED = "6 times the tokens in a micro-batch, with padding"
LEVERS = (MOST_TOKENS, PADDED, MORE_TOKENS, APART, JOINED, STAGE_0)
LEVERS_PRECISION = "bf16"
AT_ONCE = 3
"""Lanes of APART and JOINED."""
TIMES_TOKENS = {MORE_TOKENS: 3, **dict.fromkeys((MOST_TOKENS, PADDED), 6)}
GOALS = {"big": (230_000, 345_000), "base": (450_000, 650_000)}
"""Goals in real target tokens per second on one H200."""
PUBLISHED = "NVIDIA's figure for `big` on one A100 with mixed precision: 82,059 real target tokens/s"
WINDOW_ROWS = 100_000
"""Large micro-batches of pairs of like length need a large window."""


@dataclass(frozen=True)
class Case:
    """Settings of the measurement in one process."""

    preset: str
    precision: str
    lever: str
    max_tokens: int
    vocabulary: int
    num_batches: int
    num_passes: int
    """Timed passes over the same micro-batches; one before them compiles, chooses kernels and fills the allocator."""
    device: str
    folder: str


def main() -> None:
    if sys.argv[1:2] == [CASE]:
        _be_a_case(Case(**json.loads(sys.argv[2])))
        return
    arguments = _arguments()
    found = common.begin(1)
    name = f"{date.today().isoformat()}-gpu{'-acceptance' if arguments.acceptance else ''}.md"
    output = arguments.output or Path(__file__).parent / "results" / name
    if arguments.output is None and output.exists():
        sys.exit(f"{output} is there already: name another file with --output")
    command = f"# What one GPU trains\n\n    python benchmarks/gpu.py {shlex.join(sys.argv[1:])}".rstrip()
    head = f"{command}\n\n{common.machine_line(found)}\n\n"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("not measured: no CUDA device")
        output.write_text(head + _not_measured(arguments), encoding="utf-8")
        return

    def write(text: str) -> None:
        output.write_text(head + text, encoding="utf-8")

    if arguments.acceptance:
        _accept(arguments, found, write)
    else:
        figures = _measure(arguments, time.monotonic() + arguments.seconds, write)
        common.finish(arguments, found, figures)


def _measure(arguments: argparse.Namespace, deadline: float, write: Callable[[str], None]) -> dict[str, Any]:
    """Returns the outcome of each case; writes and prints the table."""
    results: list[tuple[Case, Figures | str]] = []
    text = ""
    for case, outcome in _measured_cases(arguments, deadline):
        results.append((case, outcome))
        text = f"{_description(arguments)}\n\n{_table(results)}\n"
        write(text)  # after each case: a killed benchmark keeps its results
    print("\n" + text)
    return {_name(case): outcome for case, outcome in results}


def _accept(arguments: argparse.Namespace, found: dict[str, Any], write: Callable[[str], None]) -> None:
    """Takes the parts of the acceptance; the measurements have what time is left."""
    deadline, figures, texts = time.monotonic() + arguments.seconds, {}, [""]

    def note(text: str) -> None:
        texts[0] = text
        write(text)

    def throughput(_folder: Path, _seconds: float) -> str:
        tables: list[str] = []
        before = texts[0]

        def add(text: str) -> None:
            tables.append(text)
            write(f"{before}\n{text}")

        figures.update(_measure(arguments, deadline, add))
        plain = {name: outcome for name, outcome in figures.items() if AS_TRAINED in name}
        if failed := [f"{name}: {outcome}" for name, outcome in plain.items() if isinstance(outcome, str)]:
            raise Failed("\n\n".join([*failed, *tables[-1:]]))
        return tables[-1] if tables else ""

    variables = {"CUDA_VISIBLE_DEVICES": ""} if arguments.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables):
        last = Part("Throughput", arguments.seconds, throughput)
        has_passed = accept(Path(folder), arguments.precisions, last, note, deadline)
    print(texts[0])
    common.finish(arguments, found, figures)
    sys.exit(0 if has_passed else 1)


def _measured_cases(arguments: argparse.Namespace, deadline: float) -> Iterator[tuple[Case, Figures | str]]:
    """Yields the figures of each case, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), arguments.pairs, arguments.vocabulary, 4096)
        for case in _cases(arguments, folder):
            limit = min(arguments.case_seconds, deadline - time.monotonic())
            outcome = _measured(case, limit) if limit > 0 else f"not reached in the {arguments.seconds:.0f} s of all"
            print(f"{_name(case)}: {outcome}", file=sys.stderr, flush=True)
            yield case, outcome


def _cases(arguments: argparse.Namespace, folder: str) -> Iterator[Case]:
    """Yields the cases in the order of the arguments, levers last."""
    sizes = (arguments.vocabulary, arguments.batches, arguments.rounds, arguments.device, folder)
    for preset in arguments.presets:
        for precision in arguments.precisions:
            yield Case(preset, precision, AS_TRAINED, arguments.max_tokens, *sizes)
    for preset in arguments.presets if LEVERS_PRECISION in arguments.precisions else ():
        for lever in arguments.levers:
            tokens = arguments.max_tokens * TIMES_TOKENS.get(lever, 1)
            yield Case(preset, LEVERS_PRECISION, lever, tokens, *sizes)


def _measured(case: Case, limit_seconds: float) -> Figures | str:
    """Returns the result of the case's process; at the time limit it and its child processes are killed."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if case.device == "cpu" else {})}
    process = subprocess.Popen(
        [sys.executable, __file__, CASE, json.dumps(asdict(case))], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no figure after {limit_seconds:.0f} s"
    answers = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not answers:
        last = errors.strip().splitlines()[-1:] or ["no word"]
        return f"failed with exit code {process.returncode}: {last[0][:200]}"
    figures: Figures = json.loads(answers[-1])
    return figures


def _be_a_case(case: Case) -> None:
    """Prints the case's figures as JSON."""
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    ranks = group.join(600)
    engine = _engine(case, ranks)
    steps, at_once = _steps(case), _training(case).lanes_per_pass
    _pass_seconds(engine, steps, ranks, at_once)
    gc.collect()
    gc.freeze()  # as in training
    started = time.perf_counter() - began
    seconds = [_pass_seconds(engine, steps, ranks, at_once) for _ in range(case.num_passes)]
    print(json.dumps({**_figures(case, steps, seconds, ranks), "start_seconds": started}), flush=True)
    group.leave()


def _engine(case: Case, ranks: Ranks) -> Engine:
    torch.manual_seed(SEED)
    model = Transformer(ModelConfig(preset=case.preset), case.vocabulary, case.vocabulary, PAD_ID).to(ranks.device)
    if case.lever == PADDED:  # with torch's kernels, as before there were others
        gpu_kernels.is_off = True
    training = _training(case)
    objective = Objective(model, training.label_smoothing, training.precision)
    engine = Engine(objective, training, OptimizerConfig(), ranks)
    engine.train()
    return engine


def _training(case: Case) -> TrainingConfig:
    stage, at_once = 0 if case.lever == STAGE_0 else 1, AT_ONCE if case.lever == JOINED else 1
    return TrainingConfig(precision=case.precision, zero_stage=stage, lanes_per_pass=at_once)


def _steps(case: Case) -> list[list[MicroBatch]]:
    """Returns the first micro-batches of a shuffled epoch by steps, on the CPU as the loader yields them."""
    folder = Path(case.folder)
    data = Corpus(folder, Manifest.load(folder)).run_data(1, case.max_tokens, WINDOW_ROWS)
    loader = data.loader(data.start(), 0, 0, 1, 0)
    found = [loader.next_step().batches[0] for _ in range(case.num_batches)]
    batches, lanes = [batch for batch in found if batch is not None], AT_ONCE if case.lever in (APART, JOINED) else 1
    return [batches[start : start + lanes] for start in range(0, len(batches), lanes)]


def _pass_seconds(engine: Engine, steps: Sequence[Sequence[MicroBatch]], ranks: Ranks, at_once: int) -> float:
    """Measures the optimizer steps, of so many micro-batches in a forward and backward pass."""
    began = time.perf_counter()
    for number, batches in enumerate(steps):
        seed_dropout(dropout_seed(SEED, number, batches[0].lane), ranks.device)
        tokens = sum(batch.shape.target_tokens for batch in batches)
        for first in range(0, len(batches), at_once):
            loss, _ = engine(*inputs_of(batches[first : first + at_once], ranks.device))
            engine.backward(loss, tokens, is_last=first + at_once >= len(batches))
        loss_sum = Fetched(loss.detach(), ranks)  # as in the training loop: reading it does not wait for the update
        engine.step(1e-4)
        loss_sum.value()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _figures(case: Case, steps: Sequence[Sequence[MicroBatch]], seconds: Sequence[float], ranks: Ranks) -> Figures:
    shapes, model = [batch.shape for batches in steps for batch in batches], ModelConfig(preset=case.preset)
    target, source = (sum(getattr(s, f"{side}_tokens") for s in shapes) for side in ("target", "source"))
    flops = sum(model_flops(model, case.vocabulary, s.pairs, s.source_tokens, s.target_tokens).total for s in shapes)
    on_gpu = ranks.device.type == "cuda"
    peak = published_flops(torch.cuda.get_device_name(), case.precision) if on_gpu else None
    median = statistics.median(seconds)
    return {
        "tokens_per_second": target / median,
        "slowest": target / max(seconds),
        "fastest": target / min(seconds),
        "target_tokens_a_step": target / len(steps),
        "flops_a_target_token": flops / target,
        "flops_per_second": flops / median,
        **({"mfu": flops / median / peak} if peak else {}),
        **({"peak_bytes": torch.cuda.max_memory_allocated()} if on_gpu else {}),
        "planned_bytes": max(_planned_bytes(case, shape, on_gpu) for shape in shapes),
        "padding": 1 - (source + target) / sum(s.padded_tokens for s in shapes),
    }


def _planned_bytes(case: Case, shape: BatchShape, on_gpu: bool) -> int:
    settings = {"data": {}, "model": {"preset": case.preset}, "training": _training(case).model_dump()}
    config = with_vocabularies(Config.model_validate(settings), case.vocabulary, case.vocabulary)
    of_pass = Shape(shape.rows * config.training.lanes_per_pass, shape.source_length, shape.target_length)
    return memory_of_rank(config, 1, shape=of_pass, on_gpu=on_gpu, micro_batches=1).peak_bytes


def _not_measured(arguments: argparse.Namespace) -> str:
    """Returns the text of the file without a GPU: what the command would measure, and that it did not."""
    rows = [[_name(case), "not measured: no CUDA device"] for case in _cases(arguments, "")]
    return f"**not measured**: no CUDA device.\n\n{common.markdown_table(['case', 'real target tokens/s'], rows)}\n"


def _name(case: Case) -> str:
    return f"`{case.preset}`, {case.precision}, {case.lever}"


def _description(arguments: argparse.Namespace) -> str:
    return (
        f"One rank, ZeRO 1 but where it says 0; vocabulary {arguments.vocabulary:,}; one micro-batch a step, if not said "
        "otherwise, of at most "
        f"{arguments.max_tokens:,} tokens, both sides, padding counted. {arguments.batches} micro-batches, gone through "
        f"{arguments.rounds} times: the median, and the slowest and fastest pass. MFU: FLOPs of real tokens over the data "
        f"sheet's. Gain: to the same model and precision {AS_TRAINED}. {PUBLISHED}."
    )


def _table(results: Sequence[tuple[Case, Figures | str]]) -> str:
    header = ["case", "real target tokens/s", "slowest to fastest", "gain", "MFU", "TFLOP/s", "peak memory", "planned", "padding",
              "target tokens a step", "GFLOP a target token", "goal"]  # fmt: skip
    plain = {(c.preset, c.precision): found for c, found in results if c.lever == AS_TRAINED}
    rows = []
    for case, outcome in results:
        blanks = [""] * (len(header) - 2)
        reference = plain[case.preset, case.precision]
        cells = [outcome, *blanks] if isinstance(outcome, str) else _cells(case, outcome, reference)
        rows.append([_name(case), *cells])
    return common.markdown_table(header, rows)


def _cells(case: Case, found: Figures, reference: Figures | str) -> list[str]:
    rate = found["tokens_per_second"]
    gain = "" if isinstance(reference, str) else f"{rate / reference['tokens_per_second']:.2f}"
    first, second = GOALS.get(case.preset, (None, None))
    goal = f"{first:,}, then {second:,}: {rate / first:.0%}" if first and found.get("mfu") else ""
    return [
        f"{rate:,.0f}", f"{found['slowest']:,.0f} to {found['fastest']:,.0f}", gain,
        f"{found['mfu']:.1%}" if "mfu" in found else "", f"{found['flops_per_second'] / 1e12:,.2f}",
        f"{found['peak_bytes'] / 1e9:,.1f} GB" if "peak_bytes" in found else "",
        f"{found['planned_bytes'] / 1e9:,.1f} GB", f"{found['padding']:.1%}",
        f"{found['target_tokens_a_step']:,.0f}", f"{found['flops_a_target_token'] / 1e9:.3f}", goal,
    ]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--acceptance", action="store_true", help="tests that need a GPU before the measurements")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--presets", nargs="+", choices=("tiny", "small", "base", "big"), default=["big", "base"])
    parser.add_argument("--precisions", nargs="+", choices=("fp16", "bf16", "fp32"), default=["fp16", "bf16"])
    parser.add_argument("--levers", nargs="*", choices=LEVERS, default=LEVERS)
    parser.add_argument("--vocabulary", type=int, default=37_000)
    parser.add_argument("--max-tokens", type=int, default=20_480, help="of a micro-batch: both sides, padding counted")
    parser.add_argument("--batches", type=int, default=40, help="micro-batches that a pass goes through")
    parser.add_argument("--pairs", type=int, default=200_000, help="of the corpus")
    parser.add_argument("--case-seconds", type=float, default=90, help="limit of one case")
    parser.add_argument("--seconds", type=float, default=560, help="limit of all together")
    parser.add_argument("--output", type=Path, help="markdown file; default: results/<date>-gpu.md")
    return common.arguments_of(parser, rounds=3)


if __name__ == "__main__":
    main()
