"""Common parts of the benchmarks: beginning and end, clocks, interleaved repeats, markdown tables.

A case is a function that does its work once and returns figures by name. Cases take turns, round by round, so that
other work on the machine affects all of them; a ratio is taken within each round, and medians over the rounds.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

Figures = dict[str, float]
Rounds = dict[str, list[Figures]]
"""Figures of each case, one for each round."""

PACKAGES = ("torch", "deepspeed", "datasets", "pyarrow", "numpy")


class Stopwatch:
    """Wall and CPU seconds since its construction.

    CPU: all threads of this process and, if requested, of its descendants that are alive at the reading. Those are read
    from the process table, which takes milliseconds and counts in hundredths of a second.
    """

    def __init__(self, with_descendants: bool) -> None:
        self._with_descendants = with_descendants
        self._descendants = self._descendants_cpu_seconds()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        now = self._descendants_cpu_seconds()
        return wall, cpu + sum(seconds - self._descendants.get(process, 0.0) for process, seconds in now.items())

    def _descendants_cpu_seconds(self) -> dict[psutil.Process, float]:
        found = {}
        for process in psutil.Process().children(recursive=True) if self._with_descendants else []:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended
                spent = process.cpu_times()
                found[process] = spent.user + spent.system
        return found


def interleaved(cases: Mapping[str, Callable[[], Figures]], num_rounds: int) -> Rounds:
    """Runs every case once per round, with the order rotated by one place each time."""
    names, rounds = list(cases), {name: [] for name in cases}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            rounds[name].append(cases[name]())
    return rounds


def rates(pairs: int, tokens: int, wall_seconds: float, cpu_seconds: float) -> Figures:
    """Returns the figures of a loader: totals and rates."""
    return {
        "pairs": pairs,
        "wall_seconds": wall_seconds,
        "cpu_seconds": cpu_seconds,
        "pairs_per_second": pairs / wall_seconds,
        "pairs_per_cpu_second": pairs / cpu_seconds,
        "tokens_per_second": tokens / wall_seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
    }


def median(samples: Sequence[Figures], figure: str) -> float:
    return statistics.median(sample[figure] for sample in samples)


def median_ratio(samples: Sequence[Figures], reference: Sequence[Figures], figure: str) -> float:
    """Returns the median over the rounds of samples / reference."""
    return statistics.median(a[figure] / b[figure] for a, b in zip(samples, reference, strict=True))


def ratio_range(samples: Sequence[Figures], reference: Sequence[Figures], figure: str) -> str:
    """Returns the smallest and the largest ratio of a round as text."""
    ratios = [a[figure] / b[figure] for a, b in zip(samples, reference, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def machine() -> dict[str, Any]:
    """Returns the machine and the versions of this measurement. `load_average` (1 minute) shows other work on it."""
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": _system_name(),
        "gpus": cuda,
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def machine_line(found: Mapping[str, Any]) -> str:
    """Formats `machine()` as one line of text."""
    packages = ", ".join(f"{name} {found[name]}" for name in ("python", *PACKAGES))
    return (
        f"{found['date']}: {found['cores']} {found['architecture']} cores ({found['vector_instructions']}), "
        f"{found['system']}, {', '.join(found['gpus']) or 'no GPU'}; {packages}; "
        f"load average at the start {found['load_average']}"
    )


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.platform()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a markdown table; the first column is aligned left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments_of(parser: argparse.ArgumentParser, rounds: int) -> argparse.Namespace:
    """Parses the command line, with the arguments of every benchmark added."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="file for all figures of all rounds")
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json {arguments.json}: expected a folder that is there; it would be written at the end")
    return arguments


def begin(threads: int) -> dict[str, Any]:
    """Prints and returns the machine and the versions of this measurement; SIGTERM ends what it starts, too, from here on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    found = machine()
    print(machine_line(found), flush=True)
    return found


def finish(arguments: argparse.Namespace, found: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Writes all figures of all rounds as JSON, if requested."""
    if arguments.json:
        value = {"machine": found, "arguments": vars(arguments), "figures": figures}
        arguments.json.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
