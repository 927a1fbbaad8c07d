"""Real MLflow servers that a test can start, freeze, kill and start again, over SQLite or over PostgreSQL."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from running import NOT_INHERITED, free_port, without

PATIENCE_SECONDS = 300
"""More than a minute, which is how long a run may wait before it asks a server again that was away for as long."""
REQUIRED = "DIST_TRANSFORMER_REQUIRE_SERVICES"
"""With this variable set to 1 a missing PostgreSQL is a failure; without it the tests that need it are skipped."""


class Server:
    """`mlflow server` on a free port of this machine over one store."""

    def __init__(self, folder: Path, store_uri: str) -> None:
        self.folder = folder
        self.store_uri = store_uri
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", self.store_uri]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = without(NOT_INHERITED) | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._answers_or_fails)

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """End it as a power loss would."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None
        wait_until(self._is_port_free)  # its workers end a moment later

    def freeze(self) -> None:
        """Connections are still opened, by the kernel, and nothing is answered until it thaws."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.is_started:
            self.kill()

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _answers_or_fails(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "server.log").read_text(encoding="utf-8")
        return self.answers()

    def _is_port_free(self) -> bool:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(("127.0.0.1", self.port))
            return True
        return False

    def _signal(self, number: int) -> None:
        assert self._process is not None, "the server runs"
        os.killpg(self._process.pid, number)


class Postgres:
    """A PostgreSQL of our own behind a unix socket. It does not run as root, so it has a user `postgres` then."""

    def __init__(self) -> None:
        self._programs = postgres_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # a socket's path must be short
        self._as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._as_user:
            shutil.chown(self._folder, "postgres", "postgres")
        data = str(self._folder / "data")
        self._run("initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync")
        command = [*self._as_user, str(self._programs / "postgres"), "-D", data, "-k", str(self._folder), "-h", ""]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: subprocess.run(self._command("pg_isready", "-q"), check=False).returncode == 0)

    def create(self, database: str, template: str = "template1") -> str:
        """A new database; its address for MLflow."""
        self._run("createdb", "-U", "postgres", "-h", str(self._folder), "-T", template, database)
        return f"postgresql+psycopg2://postgres@/{database}?host={self._folder}"

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)  # ends it and its sessions
        self._process.wait()
        shutil.rmtree(self._folder)

    def _command(self, program: str, *arguments: str) -> list[str]:
        where = ["-h", str(self._folder)] if program == "pg_isready" else []
        return [*self._as_user, str(self._programs / program), *where, *arguments]

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(program, *arguments), cwd=self._folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def postgres_programs() -> Path:
    """The folder of Debian's newest PostgreSQL; the test is skipped, or fails where it must not be, without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not found:
        reason = "no PostgreSQL in /usr/lib/postgresql: apt-get install postgresql"
        pytest.fail(reason) if os.environ.get(REQUIRED) == "1" else pytest.skip(reason)
    return found[-1]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
