"""Start of the command and of a run, and its speed on a busy machine.

    .venv/bin/python benchmarks/start.py
    .venv/bin/python benchmarks/start.py --parts commands      # seconds

Commands: CPU-seconds of those that only look; 0.4 is the budget of each.

Start: seconds from the command `train --ranks 2` to the end of its first step, and CPU-seconds of all its processes, as the
package is and with each of the means by which a start is short taken out of a copy of it. A means is worth its place if
the start takes at least a quarter longer, or as much more processor time, without it.

Busy machine: target tokens per second of one rank with two OpenMP threads, alone and beside three busy processes, for
several settings of GNU OpenMP's waiting threads. Both on the embedded corpus; some six minutes a round on two cores.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from common import Figures, Rounds, arguments_of, begin, finish, interleaved, markdown_table, median, median_ratio

import dist_transformer

CONFIG = """
run: {name: run}
data:
  train: {demo: train}
  lanes: 4
  max_tokens: 1024
  window_rows: 400
  loader_workers: 0
tokenizer: {vocabulary_size: 1000}
model: {preset: base, d_model: 256, d_ff: 1024, num_heads: 4, num_encoder_layers: 3, num_decoder_layers: 3}
schedule: {warmup_steps: 1}
training: {max_steps: 1, precision: fp32, log_every_steps: 1}
tracking: {enabled: false}
"""
COMMANDS = (("--help",), ("--version",), ("train", "--help"), ("config", "check", "config.yaml"))
PARTS = ["commands", "starts", "speeds"]
STEPS = 16
SKIPPED_STEPS = 4
BUSY = "while True: pass"

Edit = tuple[str, str, str]
"""File of the package, text in it, and the text in its place."""

WITHOUT: dict[str, list[Edit]] = {
    "as it is": [],
    "mlflow not kept from DeepSpeed": [
        ("training/engine/deepspeed_patches.py", 'if "mlflow" in sys.modules:', "if True:")
    ],
    "compiler not kept from DeepSpeed": [
        ("training/engine/deepspeed_patches.py", "    with without_compile, disabled:\n        yield\n", "    yield\n")
    ],
    "compiler not kept from optimizers": [
        ("training/engine/deepspeed_patches.py", 'setattr(plain, "__dynamo_disable", plain)', "pass"),
        (
            "training/engine/deepspeed_patches.py",
            "    optimizer.step = step.__get__(optimizer)  # type: ignore[method-assign]\n",
            "",
        ),
    ],
    "garbage looked for in imports": [
        ("processes/launching.py", "    gc.disable()\n", ""),
        ("processes/launching.py", "        gc.freeze()\n        gc.enable()\n", "        pass\n"),
    ],
    "ranks not forked": [("training/forked_ranks.py", "    if has_no_gpu and launching.may_fork()", "    if False")],
}

WAITING: dict[str, dict[str, str]] = {
    "GNU OpenMP's own": {"GOMP_SPINCOUNT": "", "OMP_WAIT_POLICY": ""},
    "as the command sets it": {},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = arguments_of(parser, rounds=5)
    found, figures = begin(threads=1), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        if "commands" in arguments.parts:
            looks = {" ".join(words): partial(_look, folder, words) for words in COMMANDS}
            figures["commands"] = interleaved(looks, arguments.rounds)
            rows = [[case, f"{median(each, 'cpu_seconds'):.2f}"] for case, each in figures["commands"].items()]
            print("\n" + markdown_table(["command", "CPU-seconds"], rows))
        if arguments.parts != ["commands"]:
            _command(folder, None, {}, "prepare")
        if "starts" in arguments.parts:
            starts = {case: partial(_start, folder, _copy(folder, case, edits)) for case, edits in WITHOUT.items()}
            figures["starts"] = interleaved(starts, arguments.rounds)
            _print_starts(figures["starts"])
        if "speeds" in arguments.parts:
            busy: dict[str, Callable[[], Figures]] = {
                f"{case}, {processes} busy": partial(_speed, folder, variables, processes)
                for case, variables in WAITING.items()
                for processes in (0, 3)
            }
            figures["speeds"] = interleaved(busy, arguments.rounds)
            _print_speeds(figures["speeds"])
    finish(arguments, found, figures)


def _look(folder: Path, words: tuple[str, ...]) -> Figures:
    began = _cpu_of_children()
    command = [sys.executable, "-m", "dist_transformer", *words]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return {"cpu_seconds": _cpu_of_children() - began}


def _copy(folder: Path, case: str, edits: list[Edit]) -> Path:
    """Copies the package into a folder of its own, and edits it."""
    root = folder / case.replace(" ", "_").replace("'", "")
    source = Path(dist_transformer.__file__).parent
    shutil.copytree(source, root / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, after in edits:
        path = root / source.name / file
        text = path.read_text(encoding="utf-8")
        if before not in text:
            sys.exit(f"{file}: expected the text {before!r}, which is edited for the case {case!r}")
        path.write_text(text.replace(before, after), encoding="utf-8")
    return root


def _command(folder: Path, package: Path | None, variables: dict[str, str], *arguments: str) -> None:
    environment = {**os.environ, **variables}
    environment = {name: value for name, value in environment.items() if value}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    verb, *options = arguments
    command = [sys.executable, "-m", "dist_transformer", verb, "config.yaml", *options]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")


def _start(folder: Path, package: Path) -> Figures:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    began, cpu = time.time(), _cpu_of_children()
    _command(folder, package, {"OMP_NUM_THREADS": "1"}, "train", "--ranks", "2")
    return {"seconds": _train_records(folder)[0]["time"] - began, "cpu_seconds": _cpu_of_children() - cpu}


def _speed(folder: Path, variables: dict[str, str], num_busy: int) -> Figures:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    with ExitStack() as stack:
        for _ in range(num_busy):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        _command(folder, None, {"OMP_NUM_THREADS": "2", **variables}, "train", f"training.max_steps={STEPS}")
    records = _train_records(folder)[SKIPPED_STEPS:]
    return {"tokens_per_second": statistics.median(record["tokens_per_second"] for record in records)}


def _train_records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "train"]


def _cpu_of_children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _print_starts(rounds: Rounds) -> None:
    reference = rounds["as it is"]
    rows = [
        [
            case,
            f"{median(samples, 'seconds'):.1f}",
            f"{median_ratio(samples, reference, 'seconds'):.2f}",
            f"{median(samples, 'cpu_seconds'):.1f}",
            f"{median_ratio(samples, reference, 'cpu_seconds'):.2f}",
        ]
        for case, samples in rounds.items()
    ]
    print("\n" + markdown_table(["start of two ranks", "seconds", "ratio", "CPU-seconds, whole run", "ratio"], rows))


def _print_speeds(rounds: Rounds) -> None:
    rows = [
        [case, *(f"{median(rounds[f'{case}, {busy} busy'], 'tokens_per_second'):,.0f}" for busy in (0, 3))]
        for case in WAITING
    ]
    print("\n" + markdown_table(["two threads, tokens per second", "alone", "beside three busy processes"], rows))


if __name__ == "__main__":
    main()
