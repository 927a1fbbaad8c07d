"""Ranks forked from their launcher: they end as programs do, hear signals, and run nothing of what the launcher runs.

The launcher is a process of its own: one that runs tests has threads, and is not forked whole.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from running import NOT_INHERITED, without

from dist_transformer.errors import EXIT_FAILED, EXIT_REQUEUE

HEAD = """
import os, signal, sys, threading, time
from dist_transformer.launching import fork_and_wait, fork_local_ranks, may_fork
from dist_transformer.stop_request import StopRequest
def place():
    return int(os.environ["RANK"])
def listening():
    stop = StopRequest()
    stop.listen()
    return stop
def heard(stop):
    while stop.reason() is None:
        time.sleep(0.01)
    return stop.reason()
"""


def start(body: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(body)],
        cwd=folder, env=without(NOT_INHERITED), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def ended(body: str, folder: Path) -> tuple[int, str, str]:
    """Exit code and what was said."""
    process = start(body, folder)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(paths: list[Path], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


def test_each_finds_its_place_in_a_session_of_its_own(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    code, out, err = ended(
        f"""
        def rank():
            assert os.getsid(0) == os.getpid()
            os.write(1, (" ".join(os.environ[name] for name in {names}) + "\\n").encode())
        code = fork_local_ranks(rank, 2)
        assert "RANK" not in os.environ
        print("launcher")
        sys.exit(code)
        """,
        tmp_path,
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1", "launcher"]


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("sys.exit(75 if place() == 0 else 0)", 75, ""),
        ("sys.exit(2)", 2, ""),
        ("place() == 1 and 1 / 0", EXIT_FAILED, "ZeroDivisionError"),
        ("place() == 1 and os.kill(os.getpid(), signal.SIGKILL)", EXIT_FAILED, "rank 1 was ended by signal SIGKILL"),
    ],
)
def test_each_ends_as_a_program_does_and_nothing_of_the_launcher_runs_in_it(
    tmp_path: Path, last: str, code: int, said: str
) -> None:
    ended_with, out, err = ended(
        f"""
        try:
            code = fork_local_ranks(lambda: {last}, 2)
        finally:
            os.write(1, b"end of the launcher")
        sys.exit(code)
        """,
        tmp_path,
    )
    assert (ended_with, out) == (code, "end of the launcher"), err
    assert said in err


@pytest.mark.parametrize("sent", ["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"])
def test_each_hears_a_signal_to_the_group_of_the_launcher(tmp_path: Path, sent: str) -> None:
    process = start(
        """
        def rank():
            stop = listening()
            open(f"ready{place()}", "w")
            open(f"heard{place()}", "w").write(heard(stop))
            sys.exit(75 if place() == 0 else 0)
        sys.exit(fork_local_ranks(rank, 2))
        """,
        tmp_path,
    )
    wait_for([tmp_path / f"ready{rank}" for rank in range(2)], process)
    os.killpg(process.pid, signal.Signals[sent])
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_REQUEUE, err
    arrives = "SIGTERM" if sent == "SIGHUP" else sent
    assert [(tmp_path / f"heard{rank}").read_text() for rank in range(2)] == [f"signal {arrives}"] * 2


def test_a_signal_before_it_listens_is_heard_when_it_does(tmp_path: Path) -> None:
    code, _, err = ended(
        """
        def rank():
            os.kill(os.getpid(), signal.SIGTERM)
            sys.exit(75 if heard(listening()) == "signal SIGTERM" else 1)
        sys.exit(fork_local_ranks(rank, 1))
        """,
        tmp_path,
    )
    assert code == 75, err


@pytest.mark.parametrize(("last", "code"), [("sys.exit(2)", 2), ("pass", EXIT_REQUEUE)])
def test_what_runs_before_the_ranks_is_told_of_signals_and_tells_how_it_ended(
    tmp_path: Path, last: str, code: int
) -> None:
    process = start(
        f"""
        def prepare():
            stop = listening()
            open("ready", "w")
            open("heard", "w").write(heard(stop))
            {last}
        sys.exit(fork_and_wait(prepare, lambda: open("meanwhile", "w")))
        """,
        tmp_path,
    )
    wait_for([tmp_path / "ready", tmp_path / "meanwhile"], process)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert (tmp_path / "heard").read_text() == "signal SIGUSR1"


def test_a_process_with_a_thread_is_not_to_be_forked(tmp_path: Path) -> None:
    code, _, err = ended(
        """
        assert may_fork()
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        assert not may_fork()
        end.set()
        """,
        tmp_path,
    )
    assert code == 0, err
