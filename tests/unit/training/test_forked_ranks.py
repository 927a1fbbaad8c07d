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
from dist_transformer.processes import launching
from dist_transformer.processes.children import forwarding_signals
from dist_transformer.processes.launching import fork_and_wait, fork_local_ranks, may_fork
from dist_transformer.processes.stop_request import StopRequest
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
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_for(paths: list[Path], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
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
    _, err = process.communicate(timeout=240)
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
        with forwarding_signals() as signals:
            sys.exit(fork_and_wait(prepare, lambda: open("meanwhile", "w"), signals))
        """,
        tmp_path,
    )
    wait_for([tmp_path / "ready", tmp_path / "meanwhile"], process)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=240)
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


@pytest.mark.parametrize("sent", ["SIGUSR1", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_signal_just_before_a_rank_is_forked_reaches_that_rank_too(tmp_path: Path, sent: str, place: int) -> None:
    code, _, err = ended(
        f"""
        environment_of = launching.rank_environment
        def with_a_signal(rank, *others):
            if rank == {place}:
                os.kill(os.getpid(), signal.{sent})
            return environment_of(rank, *others)
        launching.rank_environment = with_a_signal
        def rank():
            until = time.monotonic() + 120
            stop = listening()
            while stop.reason() is None and time.monotonic() < until:
                time.sleep(0.01)
            sys.exit(75 if stop.reason() == "signal {sent}" else 1)
        sys.exit(fork_local_ranks(rank, 2))
        """,
        tmp_path,
    )
    assert code == EXIT_REQUEUE, err


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGUSR1", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("helper", [1, 2])
@pytest.mark.parametrize("is_forked", [True, False])
def test_a_signal_while_a_rank_begins_to_listen_is_heard(
    tmp_path: Path, sent: str, helper: int, is_forked: bool
) -> None:
    """Its helpers, two processes, are started meanwhile."""
    code, _, err = ended(
        f"""
        from multiprocessing import forkserver, resource_tracker, util
        start, started = util.spawnv_passfds, []
        def then_signal(*arguments):
            pid = start(*arguments)
            started.append(pid)
            if len(started) == {helper}:
                os.kill(os.getpid(), signal.{sent})
            return pid
        util.spawnv_passfds = then_signal
        def rank():
            stop = listening()
            assert len(started) == 2
            time.sleep(0.1)
            for pid in started:
                os.kill(pid, 0)
            sys.exit(75 if stop.reason() == "signal {sent}" else 1)
        sys.exit(fork_local_ranks(rank, 1)) if {is_forked} else rank()
        """,
        tmp_path,
    )
    assert code == EXIT_REQUEUE, err


@pytest.mark.parametrize("last", [signal.SIGKILL, signal.SIGQUIT])
def test_ranks_hear_of_the_end_of_their_launcher(tmp_path: Path, last: signal.Signals) -> None:
    process = start(
        """
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background commands are started with it ignored
        def rank():
            stop = listening()
            open(f"ready{place()}", "w").write(str(os.getpid()))
            open(f"new{place()}", "w").write(heard(stop))
            os.rename(f"new{place()}", f"heard{place()}")
        sys.exit(fork_local_ranks(rank, 2))
        """,
        tmp_path,
    )
    wait_for([tmp_path / f"ready{rank}" for rank in range(2)], process)
    process.send_signal(last)
    assert process.wait(120) == -last
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"heard{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [(tmp_path / f"heard{rank}").read_text() for rank in range(2)] == ["signal SIGUSR2"] * 2
    process.communicate(timeout=240)


def test_exit_codes_are_known_also_where_the_ends_of_children_were_to_be_ignored(tmp_path: Path) -> None:
    code, out, err = ended(
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with forwarding_signals() as signals:
            print(fork_and_wait(lambda: None, lambda: None, signals))
            print(fork_local_ranks(lambda: sys.exit(2), 2, signals=signals))
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
        """,
        tmp_path,
    )
    assert (code, out) == (0, "0\n2\n"), err


@pytest.mark.parametrize(("late", "code"), [(1, EXIT_REQUEUE), (0, EXIT_FAILED)])
def test_a_rank_that_stays_after_another_has_ended_well_is_killed_too(tmp_path: Path, late: int, code: int) -> None:
    began = time.monotonic()
    ended_with, _, err = ended(
        f"""
        def rank():
            if place() == {late}:
                time.sleep(600)
            sys.exit(75 if place() == 0 else 0)
        from dist_transformer.processes import launching
        launching.GRACE_SECONDS = 0.5
        sys.exit(fork_local_ranks(rank, 2))
        """,
        tmp_path,
    )
    assert (ended_with, err) == (code, f"rank {late} still ran 0.5 s after another had ended; killed\n")
    assert time.monotonic() - began < 240  # and not its 600 seconds


def test_where_no_process_can_be_started_those_before_it_are_ended_and_the_person_is_told(tmp_path: Path) -> None:
    code, _, err = ended(
        """
        from dist_transformer.errors import MachineError
        fork, forked = os.fork, []
        def fork_once():
            if forked:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            pid = fork()
            forked.append(pid)
            if pid == 0:
                time.sleep(600)  # it has not come to a session of its own
            return pid
        os.fork = fork_once
        try:
            fork_local_ranks(lambda: None, 2)
        except MachineError as error:
            assert "process 2 of this machine cannot be started: [Errno 11]" in str(error)
            os.waitpid(forked[0], 0)
            sys.exit(0)
        """,
        tmp_path,
    )
    assert code == 0, err


def test_a_rank_that_ends_leaves_no_folder_of_its_helpers(tmp_path: Path) -> None:
    code, _, err = ended(
        f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path)!r}
        from dist_transformer.processes.stop_request import leave
        def rank():
            listening()
            assert os.listdir({str(tmp_path)!r})
            place() == 0 and leave(0)
        sys.exit(fork_local_ranks(rank, 2))
        """,
        tmp_path,
    )
    assert (code, os.listdir(tmp_path)) == (0, []), err
