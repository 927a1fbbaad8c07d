"""Running the command as a user does, and reading what a run wrote."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NOT_INHERITED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MLFLOW_TRACKING_URI",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in the tests' own process as soon as a test compiles something there
    "PYTHONDONTWRITEBYTECODE",  # with it each of the many starts would compile the package anew
)
PROGRAM = [sys.executable, "-m", "dist_transformer"]


def without(names: Iterable[str]) -> dict[str, str]:
    """The environment without these variables."""
    return {name: value for name, value in os.environ.items() if name not in names}


def with_constants(values: Mapping[str, Any]) -> dict[str, str]:
    """Variables for processes in which constants of the program have these values: {"tracking.tracker.CLOSE_SECONDS": 1}."""
    by_module: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        module, _, name = path.rpartition(".")
        by_module.setdefault(f"dist_transformer.{module}", {})[name] = value
    folders = [str(Path(__file__).with_name("other_constants")), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders), "OTHER_CONSTANTS": json.dumps(by_module)}


class Command:
    """`dist-transformer` as a process of its own."""

    def __init__(self, folder: Path, quick: Path | None = None) -> None:
        """`quick`: the client of a command server, for what is run to its end with no variables of its own."""
        self.folder, self._quick = folder, quick

    def start(self, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
        return self._start(PROGRAM, arguments, environment)

    def _start(
        self, program: list[str], arguments: tuple[object, ...], environment: dict[str, str]
    ) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*program, *map(str, arguments)],
            cwd=self.folder,
            env={**without(NOT_INHERITED), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: object, code: int = 0, text: str | None = None, **environment: str) -> str:
        """Runs it to its end; what it wrote on both streams. The exit code must be `code`."""
        is_quick = self._quick is not None and not environment  # a variable may matter when the program is imported
        process = self._start([str(self._quick)] if is_quick else PROGRAM, arguments, environment)
        out, err = process.communicate(text, timeout=300)
        assert process.returncode == code, f"exit code {process.returncode}, expected {code}\n{out}\n{err}"
        return out + err


def records(run: Path, event: str = "train", file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The records of one kind of a run folder's metrics."""
    lines = (run / file).read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def wait_for_step(run: Path, step: int, seconds: float = 120) -> None:
    """Returns once metrics.jsonl holds a record of that step or a later one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and any(r["step"] >= step for r in records(run)):
            return
        time.sleep(0.02)
    raise AssertionError(f"{run}: no step {step} within {seconds} s")
