"""One run of a trainer: started as its user starts it, timed from outside at the lines that say how far it is.

When a line says that a step is done, the seconds of the whole process tree are read: processors' and the wall's. A
speed is the work between two such lines, so the start (imports, vocabulary, tracing, first batches) is in neither of
them. After the last line the trainer is killed: what it does at its end is not part of the race.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import Figures
from protocol import Mark, Peer, Task

TAIL_LINES = 15
INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
STALL_SECONDS = 1200
"""A trainer that prints lines, but none that says how far it is, for so long is given up."""


class Failed(Exception):
    """The trainer ended before its last step; the message is the end of its output."""


@dataclass(frozen=True)
class Reading:
    """A mark, and what the process tree had used when it came."""

    mark: Mark
    wall_seconds: float
    cpu_seconds: float


def run(peer: Peer, python: Path, task: Task) -> list[Reading]:
    """Runs the trainer up to its last step. Raises Failed."""
    task.folder.mkdir(parents=True)
    process = subprocess.Popen(
        peer.start(task, python),
        cwd=task.folder,
        env=_environment(task.threads),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return _readings(peer, task, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def speed(readings: list[Reading], warmup_steps: int) -> Figures:
    """Between the first line at or after the last step of the warm-up and the last one."""
    timed = [reading for reading in readings if reading.mark.step >= warmup_steps]
    first, last = timed[0], timed[-1]
    tokens = sum(reading.mark.target_tokens for reading in timed[1:])
    wall, cpu = last.wall_seconds - first.wall_seconds, last.cpu_seconds - first.cpu_seconds
    return {
        "steps": last.mark.step - first.mark.step,
        "target_tokens": tokens,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
        "tokens_per_step": tokens / (last.mark.step - first.mark.step),
        "start_cpu_seconds": readings[0].cpu_seconds - readings[0].mark.step * cpu / (last.mark.step - first.mark.step),
    }


def _readings(peer: Peer, task: Task, process: "subprocess.Popen[str]") -> list[Reading]:
    tree, started = psutil.Process(process.pid), time.perf_counter()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    readings: list[Reading] = []
    assert process.stdout is not None
    with (task.folder / "output.txt").open("w", encoding="utf-8") as log:
        for line in process.stdout:
            mark = peer.mark(line, task)
            if mark is not None:
                readings.append(Reading(mark, time.perf_counter() - started, _cpu_seconds(tree)))
            log.write(line)
            tail.append(line)
            if mark is not None and mark.step >= task.last_step:
                return readings
            if time.perf_counter() - started - (readings[-1].wall_seconds if readings else 0) > STALL_SECONDS:
                break
    raise Failed("".join(tail) or "it printed nothing")


def _cpu_seconds(tree: psutil.Process) -> float:
    """Of all processes of the tree; those that have ended are in the sums of the ones that waited for them."""
    total = 0.0
    for process in (tree, *tree.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user and system, own and of children that have ended
    return total


def _environment(threads: int) -> dict[str, str]:
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**kept, **counts, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
