"""Acceptance of one GPU: what only a GPU can show, correctness first. Part of gpu.py, which limits the time of all parts.

    python benchmarks/gpu.py --acceptance               # ten minutes; writes benchmarks/results/<date>-gpu-acceptance.md

1. The kernels in Triton against torch in fp64 (tests/unit/model/test_gpu_kernels.py).
2. Every combination of ZeRO stage, precision and option of tests/distributed/matrix_program.py on one rank, against plain
   torch on the CPU: fused Adam, offload and activation checkpointing among them.
3. The demo trained by the command, killed twice, resumed in the same and in another ZeRO stage, beside a run without a stop.
4. `preflight` of the machine, and `plan` with what it measured.
5. gpu.py: tokens per second, MFU, memory against the plan's, and each lever alone.

The first three run side by side.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

from dist_transformer.planning.flops import gpu_kind

ROOT = Path(__file__).resolve().parents[1]
DEMO, PAPER = ROOT / "configs" / "demo.yaml", ROOT / "configs" / "wmt14_en_de_base.yaml"
TESTS = ROOT / "tests"
MATRIX = TESTS / "distributed" / "matrix_program.py"
PROGRAM = (sys.executable, "-m", "dist_transformer")
STEPS, FIRST_KILL, SECOND_KILL = 60, 25, 45
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Of a loss after a resume, relative: sums of atomic additions come in another order each time."""


@dataclass(frozen=True)
class Part:
    """A part of the acceptance.

    Attributes:
        take: does it in a folder, within so many seconds; returns what to write. Raises `Failed`.
    """

    name: str
    seconds: float
    take: Callable[[Path, float], str]


class Failed(Exception):
    """The device failed a part, for this reason."""


def accept(
    folder: Path, precisions: Sequence[str], throughput: Part, write: Callable[[str], None], deadline: float
) -> bool:
    """Takes the parts until the deadline by the monotonic clock: what is not timed side by side, then what is timed, alone.
    Writes all results after each; True if none failed."""
    side_by_side = [
        Part("Kernels", 150, _kernels),
        Part("Stages, precisions and options", 240, _matrix),
        *(Part(f"Save, kill, resume in {p}", 150, lambda f, s, p=p: _resume(f, s, p)) for p in precisions),  # type: ignore[misc]
    ]
    alone = [Part("Preflight and plan", 90, _preflight), throughput]
    texts: list[str] = []
    verdicts: list[str] = []

    def take(part: Part) -> tuple[str, str]:
        inside, began = Path(tempfile.mkdtemp(dir=folder)), time.monotonic()
        try:
            verdict, text = "passed", part.take(inside, max(1.0, min(part.seconds, deadline - began)))
        except Exception as error:  # noqa: BLE001  (whatever a device does is a result of its acceptance)
            words = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            verdict, text = "failed", words
        return verdict, f"## {part.name}: {verdict}, {time.monotonic() - began:.0f} s\n\n{text}\n"

    def note(part: Part, verdict: str, text: str) -> None:
        texts.append(text)
        verdicts.append(verdict)
        write("\n".join(texts))
        print(f"{part.name}: {verdict}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(len(side_by_side)) as pool:
        for part, found in zip(side_by_side, pool.map(take, side_by_side), strict=True):
            note(part, *found)
    for part in alone:
        note(part, *take(part))
    return "failed" not in verdicts


def run(command: Sequence[object], folder: Path, seconds: float, **variables: str) -> str:
    """Returns what a command printed.

    Raises:
        Failed: it ended with another exit code than 0.
        subprocess.TimeoutExpired: it took longer.
    """
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env={**os.environ, **variables}, timeout=seconds,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise Failed(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n\n```\n{last}\n```")
    return done.stdout


def _kernels(folder: Path, seconds: float) -> str:
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", TESTS / "unit" / "model" / "test_gpu_kernels.py"]
    said = run(tests, folder, seconds, DIST_TRANSFORMER_TEST_GPUS=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return f"{said.strip().splitlines()[-1]}, against torch in fp64."


def _matrix(folder: Path, seconds: float) -> str:
    results = folder / "matrix.json"
    run([sys.executable, MATRIX, results, "--everything"], folder, seconds, DIST_TRANSFORMER_FP16_ON_CPU="1")
    sys.path[:0] = [str(MATRIX.parent), str(TESTS / "helpers")]
    from matrix_program import Combination, deviation, reference

    worst: dict[tuple[int, str], float] = {}
    wrong, number = [], Counter[tuple[int, str]]()
    for result in json.loads(results.read_text(encoding="utf-8")):
        combination = Combination(*result["combination"])
        kind = combination.stage, combination.precision
        number[kind] += 1
        worst[kind] = max(worst.get(kind, 0.0), deviation(result))
        norms = max(abs(n / e - 1) for n, e in zip(result["norms"], reference(combination).norms, strict=True))
        if (
            not (deviation(result) <= combination.tolerance and norms <= 10 * combination.tolerance)
            or result["not_tiled"]
        ):
            wrong.append(
                f"{combination}: losses {deviation(result):.0e} and gradient norms {norms:.0e} from plain torch's; not tiled: "
                f"{result['not_tiled']}"
            )
    if wrong:
        raise Failed("\n".join(wrong))
    rows = [[f"ZeRO {s}, {p}", str(number[s, p]), f"{value:.0e}"] for (s, p), value in worst.items()]
    return common.markdown_table(["", "combinations", "largest relative difference of a loss"], rows)


def _resume(folder: Path, seconds: float, precision: str) -> str:
    settings = {
        "run.root": folder,
        "training.precision": precision,
        "training.max_steps": STEPS,
        "schedule.warmup_steps": STEPS,
        "training.log_every_steps": 1,
        "checkpoints.every_steps": STEPS // 6,
        "validation.every_steps": STEPS,
        "tracking.enabled": "false",
        "data.audit": "true",
    }
    train = [*PROGRAM, "train", DEMO, *(f"{key}={value}" for key, value in settings.items())]
    end = time.monotonic() + seconds
    run([*train, "run.name=whole", "--quiet"], folder, seconds)
    for step in (FIRST_KILL, SECOND_KILL):
        _killed_at(step, [*train, "run.name=killed", "--quiet"], folder, end)
    run([*train, "run.name=killed", "training.zero_stage=2", "--quiet"], folder, end - time.monotonic())
    starts = [record["step"] for record in _records(folder / "killed" / "history.jsonl", "start")]
    if len(starts) != 3 or not 0 == starts[0] < starts[1] <= starts[2]:
        raise Failed(f"it should have started at step 0 and resumed twice from a checkpoint, but started at {starts}")
    whole, killed = (_losses(folder / name / "metrics.jsonl") for name in ("whole", "killed"))
    if set(whole) != set(killed):
        raise Failed(f"steps without a record: {sorted(set(whole) ^ set(killed))}")
    difference = max(abs(killed[step] / loss - 1) for step, loss in whole.items())
    resumed = f"resumed from steps {starts[1]} and {starts[2]}, last with training.zero_stage 2"
    text = f"Killed after steps {FIRST_KILL} and {SECOND_KILL}, {resumed}: losses within {difference:.0e}"
    if not difference <= TOLERANCE[precision]:
        raise Failed(f"{text}, above {TOLERANCE[precision]:g}")
    return f"{text} of the run without a stop."


def _killed_at(step: int, command: Sequence[object], folder: Path, end: float) -> None:
    """Starts the command, and kills it with all its ranks when it has logged the step."""
    history, metrics = folder / "killed" / "history.jsonl", folder / "killed" / "metrics.jsonl"
    starts = len(_records(history, "start"))
    process = subprocess.Popen([str(word) for word in command], cwd=folder, start_new_session=True)
    try:
        while len(_records(history, "start")) == starts or max(_losses(metrics), default=0) < step:
            if process.poll() is not None:
                raise Failed(f"it ended with {process.returncode} before step {step}")
            if time.monotonic() > end:
                raise Failed(f"it did not come to step {step} in time")
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code != -signal.SIGKILL:
        raise Failed(f"it ended with {code} before it could be killed after step {step}")


def _losses(metrics: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in _records(metrics, "train")}


def _records(file: Path, event: str) -> list[dict[str, Any]]:
    """Returns the complete records of a kind; none if there is no such file yet."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["event"] == event]


def _preflight(folder: Path, seconds: float) -> str:
    import torch

    run([*PROGRAM, "preflight", "--folder", folder, "--seconds", int(seconds)], folder, seconds + 10)
    medians = json.loads((folder / "report.json").read_text(encoding="utf-8"))["medians"]
    text = common.markdown_table(["measured", ""], [[name, f"{value:,.4g}"] for name, value in medians.items()])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if (kind := gpu_kind(device)) is None:
        return f"{text}\n\nNo plan: `plan --gpu` does not know {device}."
    calibrated = ["--gpu", kind, "--calibrate", folder / "report.json", "--gpus-per-node", 8]
    return f"{text}\n\n```\n{run([*PROGRAM, 'plan', PAPER, *calibrated], folder, 60)}```"
