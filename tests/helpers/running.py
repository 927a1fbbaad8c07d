"""Running the command as a user does, and reading what a run wrote."""

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
    "PYTHONDONTWRITEBYTECODE",  # with it each of the many starts would compile the package anew
)
PROGRAM = [sys.executable, "-m", "dist_transformer"]
OTHER_CONSTANTS = Path(__file__).with_name("other_constants")
READ_WHEN_NEEDED = re.compile(
    r"SLURM_.*|MLFLOW_TRACKING_URI|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PATH|CXX"
)
"""Variables that matter to no import, neither of the program nor of a library."""
_PORTS = itertools.count(random.SystemRandom().randrange(500))


def without(names: Iterable[str]) -> dict[str, str]:
    """The environment without these variables."""
    return {name: value for name, value in os.environ.items() if name not in names}


def with_constants(values: Mapping[str, Any]) -> dict[str, str]:
    """Variables for processes in which constants of the program have these values: {"tracking.tracker.CLOSE_SECONDS": 1}."""
    by_module: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        module, _, name = path.rpartition(".")
        by_module.setdefault(f"dist_transformer.{module}", {})[name] = value
    folders = [str(OTHER_CONSTANTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders), "OTHER_CONSTANTS": json.dumps(by_module)}


def _may_matter_to_imports(environment: Mapping[str, str]) -> bool:
    """False for constants, too: a command server imports the program anew for them."""
    others = {name for name in environment if not READ_WHEN_NEEDED.fullmatch(name)}
    if "OTHER_CONSTANTS" in others and environment.get("PYTHONPATH") == with_constants({})["PYTHONPATH"]:
        others -= {"OTHER_CONSTANTS", "PYTHONPATH"}
    return bool(others)


def free_port() -> int:
    """A port of this machine that nobody listens on, for who will do so later, and maybe again and again.

    It is below those that the kernel gives to whoever asks for any: one of these could be taken before. Each worker of
    pytest-xdist has ports of its own.
    """
    first_of_kernel = max(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 20_000)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = first_of_kernel - 500 * worker - next(_PORTS) % 500 - 1
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Command:
    """`dist-transformer` as a process of its own."""

    def __init__(self, folder: Path, quick: Path | None = None) -> None:
        """`quick`: the client of a command server, for what is run to its end with no variables that matter to imports."""
        self.folder, self._quick = folder, quick
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
        return self._start(PROGRAM, arguments, environment)

    def _start(
        self, program: list[str], arguments: tuple[object, ...], environment: dict[str, str]
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*program, *map(str, arguments)],
            cwd=self.folder,
            env={**without(NOT_INHERITED), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def kill_what_is_left(self) -> None:
        """Kills what a test that failed left running: it would take the processors from the next ones."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def __call__(self, *arguments: object, code: int = 0, text: str | None = None, **environment: str) -> str:
        """Runs it to its end; what it wrote on both streams. The exit code must be `code`."""
        return "".join(self.streams(*arguments, code=code, text=text, **environment))

    def streams(
        self, *arguments: object, code: int = 0, text: str | None = None, **environment: str
    ) -> tuple[str, str]:
        """The same, with what it wrote on each stream."""
        ended = self._end_of(PROGRAM, arguments, text, environment)
        assert ended.returncode == code, (
            f"exit code {ended.returncode}, expected {code}\n{ended.stdout}\n{ended.stderr}"
        )
        return ended.stdout, ended.stderr

    def program(self, file: Path, *arguments: object, **environment: str) -> tuple[int, str]:
        """Runs a program of the tests, in place of the command, to its end: its exit code, what it wrote on both streams."""
        ended = self._end_of([sys.executable, str(file)], arguments, None, environment)
        return ended.returncode, ended.stdout + ended.stderr

    def start_program(self, file: Path, *arguments: object) -> "subprocess.Popen[str]":
        """Starts a program of the tests in place of the command."""
        return self._start([sys.executable, str(file)], arguments, {})

    def _end_of(
        self, program: list[str], arguments: tuple[object, ...], text: str | None, environment: dict[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        if self._quick is not None and not _may_matter_to_imports(environment):
            program = [str(self._quick), *(program[1:] if program != PROGRAM else [])]
        process = self._start(program, arguments, environment)
        out, err = process.communicate(text, timeout=900)
        return subprocess.CompletedProcess(program, process.returncode, out, err)


def records(run: Path, event: str = "train", file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The records of one kind of a run folder's metrics."""
    text = (run / file).read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be half written
    return [record for record in map(json.loads, lines) if record["event"] == event]


def newest_step(run: Path) -> int:
    """The step of the newest record of metrics.jsonl; 0: there is none."""
    return max((record["step"] for record in records(run)), default=0) if (run / "metrics.jsonl").exists() else 0


def kill_ranks(launcher: "subprocess.Popen[str]") -> None:
    """Kills the ranks that it has started, of which one may have left by then, as it lost another."""
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="utf-8").split():
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def wait_for_start(process: "subprocess.Popen[str]", run: Path, number: int, seconds: float = 240) -> None:
    """Returns once the start of this number, a process, has cut the records of the one before back to its checkpoint."""
    deadline = time.monotonic() + seconds
    while not (run / "run.json").exists() or json.loads((run / "run.json").read_text())["starts"] < number:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def wait_for_step(run: Path, step: int, seconds: float = 240) -> None:
    """Returns once metrics.jsonl holds a record of that step or a later one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and any(r["step"] >= step for r in records(run)):
            return
        time.sleep(0.02)
    raise AssertionError(f"{run}: no step {step} within {seconds} s")
