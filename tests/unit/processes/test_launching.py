"""Ranks on one machine: their places, signals, exit codes. The ranks are tiny stand-ins of a few lines."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from dist_transformer.errors import UserError
from dist_transformer.processes import launching
from dist_transformer.processes.children import forwarding_signals
from dist_transformer.processes.launching import (
    free_port,
    importing,
    num_ranks_given,
    rank_environment,
    run_program,
    start_local_ranks,
)

HEAD = "import os, sys, signal, time, json\nrank = int(os.environ['RANK'])\n"


def _program(body: str) -> list[str]:
    return [sys.executable, "-c", HEAD + textwrap.dedent(body)]


def _run(body: str, num_ranks: int = 3, arguments: list[str] | None = None, grace_seconds: float = 30.0) -> int:
    with patch.object(launching, "GRACE_SECONDS", grace_seconds):
        return start_local_ranks(arguments or [], num_ranks, program=_program(body))


def test_a_port_for_later_is_none_that_the_kernel_gives_away_meanwhile() -> None:
    """By Linux' default range, /proc/sys/net/ipv4/ip_local_port_range."""
    assert {free_port() < 32_768 for _ in range(20)} == {True}


def test_each_rank_finds_its_place_and_the_arguments(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    body = f"open(f'{tmp_path}/{{rank}}', 'w').write(json.dumps([sys.argv[1:], [os.environ[n] for n in {names}]]))"
    assert _run(body, 3, ["config.yaml", "run.name=a b"]) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert all(arguments == ["config.yaml", "run.name=a b"] for arguments, _ in found)
    [port] = {places[-1] for _, places in found}
    assert [places for _, places in found] == [[str(r), str(r), "3", "3", "127.0.0.1", port] for r in range(3)]


WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        *(({name: None}, f"no {name}") for name in WHOLE if name != "RANK"),
        *(({name: ""}, f"no {name}") for name in WHOLE),
        *(({name: text}, f"{name}={text}") for name in WHOLE if name != "MASTER_ADDR" for text in ("-1", "two", "0x1")),
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    ],
    ids=str,
)
def test_an_environment_that_names_a_rank_in_part_or_wrongly_is_refused_with_all_that_it_has(
    changed: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {**WHOLE, **changed}.items():
        monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"got .*{says}") as refused:
        num_ranks_given()
    assert refused.value.exit_code == 2


def test_a_whole_environment_of_a_rank_names_the_number_of_ranks_and_one_without_rank_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in WHOLE.items():
        monkeypatch.setenv(name, text)
    assert num_ranks_given() == 2
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    assert num_ranks_given(()) == 2  # of ranks that do not talk to each other
    monkeypatch.delenv("RANK")
    assert num_ranks_given() is None


def test_the_cores_are_shared_unless_the_user_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert rank_environment(0, 2, 1)["OMP_NUM_THREADS"] == "4"
    assert rank_environment(0, 20, 1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rank_environment(0, 2, 1)["OMP_NUM_THREADS"] == "3"


def test_garbage_is_looked_for_neither_while_modules_are_imported_nor_in_them_later() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_the_requeue_code_of_rank_0_is_the_result_also_when_it_ends_first() -> None:
    assert _run("sys.exit(75 if rank == 0 else 0)") == 75
    assert _run("time.sleep(0.3 * rank); sys.exit(75 if rank == 0 else 0)") == 75


def test_the_first_failure_is_the_result_whatever_the_others_say_later(tmp_path: Path) -> None:
    body = f"""
        pid_file = '{tmp_path}/pid'
        if rank == 1:
            open(pid_file + '.new', 'w').write(str(os.getpid()))
            os.rename(pid_file + '.new', pid_file)
            sys.exit(2)
        while not os.path.exists(pid_file):
            time.sleep(0.01)
        while os.path.exists('/proc/' + open(pid_file).read()):  # until the launcher has taken its exit code
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(75 if rank == 0 else 1)
    """
    assert _run(body) == 2


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("SIGKILL", ""),
        ("SIGBUS", ": a mapped file could not be read: its disk failed, it was cut short, or /dev/shm is full"),
    ],
)
def test_a_rank_ended_by_a_signal_fails_the_run_and_is_named(
    name: str, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run(f"rank == 1 and os.kill(os.getpid(), signal.{name})") == 1
    assert capfd.readouterr().err == f"rank 1 was ended by signal {name}{cause}\n"


def test_a_rank_ended_by_a_signal_is_named_last_where_many_ranks_failed_even_if_another_was_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They lost it, and said so; here rank 0 was even quicker."""
    body = f"""
        first = '{tmp_path}/first'
        if rank == 0:
            open(first + '.new', 'w').write(str(os.getpid()))
            os.rename(first + '.new', first)
        while rank and not (os.path.exists(first) and not os.path.exists('/proc/' + open(first).read())):
            time.sleep(0.01)  # until the launcher has taken its exit code
        rank == 2 and os.kill(os.getpid(), signal.SIGKILL)
        print(f'rank {{rank}} of 4 failed', file=sys.stderr)
        sys.exit(1)
    """
    assert _run(body, 4) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "4 ranks failed; ended by a signal: rank 2 (SIGKILL)"


def test_ranks_that_stay_after_a_failure_are_killed_with_their_helpers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
        while rank == 0:
            if sum(name.endswith('.pid') for name in os.listdir('{tmp_path}')) == 6:
                sys.exit(1)
            time.sleep(0.01)
        place = f'{tmp_path}/{{rank}}{{os.fork() == 0}}'
        open(place, 'w').write(str(os.getpid()))
        os.rename(place, place + '.pid')
        time.sleep(600)
    """
    assert _run(body, 4, grace_seconds=1.0) == 1
    for path in tmp_path.iterdir():
        assert _has_ended(int(path.read_text()))
    assert capfd.readouterr().err == "rank 1, 2, 3 still ran 1 s after another had failed; killed\n"


def _has_ended(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
    return False


def test_ranks_that_leave_by_themselves_after_a_failure_are_given_the_time(tmp_path: Path) -> None:
    body = f"rank == 0 and sys.exit(1); time.sleep(0.3); open('{tmp_path}/left', 'w')"
    assert _run(body, 2) == 1
    assert (tmp_path / "left").exists()


def _wait_for(paths: list[Path], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ("SIGUSR1", "SIGUSR1"),
        ("SIGUSR2", "SIGUSR2"),
        ("SIGTERM", "SIGTERM"),
        ("SIGINT", "SIGINT"),
        ("SIGHUP", "SIGTERM"),
    ],
)
def test_each_rank_gets_each_signal_once_even_from_a_terminal(tmp_path: Path, sent: str, arrives: str) -> None:
    """The signal goes to the launcher's whole process group, as Ctrl-C in a terminal does."""
    rank = HEAD + textwrap.dedent(f"""
        got = []
        for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(n, lambda n, f: got.append(signal.Signals(n).name))
        open(f'{tmp_path}/ready{{rank}}', 'w')
        while not got:
            time.sleep(0.02)
        time.sleep(0.3)  # for a second one to come, if there is one
        open(f'{tmp_path}/got{{rank}}', 'w').write(' '.join(got))
        sys.exit(75 if rank == 0 else 0)
    """)
    launcher = f"""
import sys
from dist_transformer.processes.launching import start_local_ranks
sys.exit(start_local_ranks([], 2, program=[sys.executable, '-c', {rank!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], start_new_session=True)
    _wait_for([tmp_path / f"ready{rank}" for rank in range(2)], process)
    os.killpg(process.pid, signal.Signals[sent])
    assert process.wait(120) == 75
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == [arrives, arrives]


def test_only_the_main_thread_of_the_launcher_takes_signals(tmp_path: Path) -> None:
    """One that another thread took would wake the main thread no sooner than a rank ends: it was lost where all stood."""
    body = f"""
        from pathlib import Path
        def is_blocked(task):
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            return bool(int(status["SigBlk"], 16) >> (signal.SIGUSR1 - 1) & 1)
        tasks, main = Path(f"/proc/{{os.getppid()}}/task"), str(os.getppid())
        while rank == 0 and (len([*tasks.iterdir()]) < 3 or is_blocked(tasks / main)):
            time.sleep(0.01)
        if rank == 0:
            found = [is_blocked(task) for task in tasks.iterdir() if task.name != main]
            Path({str(tmp_path / "new")!r}).write_text(json.dumps(found))
            os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "found")!r})
        while not os.path.exists({str(tmp_path / "found")!r}):
            time.sleep(0.01)
        """
    launch = f"from dist_transformer.processes.launching import *\nstart_local_ranks([], 2, program={_program(body)!r})"
    subprocess.run([sys.executable, "-c", launch], timeout=300, check=True)
    assert json.loads((tmp_path / "found").read_text()) == [True, True]


def test_a_signal_that_comes_while_a_rank_is_started_reaches_it_too_and_the_others_once(tmp_path: Path) -> None:
    """The launcher does not have it in its hands yet."""
    rank = HEAD + textwrap.dedent(f"""
        got = []
        signal.signal(signal.SIGTERM, lambda n, f: got.append(n))
        open(f'{tmp_path}/ready{{rank}}', 'w')
        until = time.monotonic() + 120
        while not got and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)  # for a second one to come, if there is one
        sys.exit(75 if len(got) == 1 else 3)
    """)
    launcher = f"""
import os, signal, subprocess, sys, time
from dist_transformer.processes.launching import start_local_ranks
class Slow(subprocess.Popen):
    def __init__(self, *arguments, env, **named):
        super().__init__(*arguments, env=env, **named)
        while not os.path.exists('{tmp_path}/ready' + env['RANK']):
            time.sleep(0.02)
        if env['RANK'] == '1':
            os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Slow
sys.exit(start_local_ranks([], 2, program=[sys.executable, '-c', {rank!r}]))
"""
    assert subprocess.run([sys.executable, "-c", launcher], timeout=240).returncode == 75


def test_a_rank_that_is_to_listen_is_not_ended_by_a_signal_before_it_does(tmp_path: Path) -> None:
    rank = HEAD + textwrap.dedent(f"""
        open(f'{tmp_path}/ready{{rank}}', 'w')
        time.sleep(0.5)
        from dist_transformer.processes.stop_request import StopRequest
        stop = StopRequest()
        assert stop.started < {time.time() + 3600} and 'DIST_TRANSFORMER_STARTED' in os.environ
        stop.listen()
        while stop.reason() is None:
            time.sleep(0.01)
        sys.exit(75 if stop.reason() == 'signal SIGUSR1' else 1)
    """)
    launcher = f"""
import sys
from dist_transformer.processes.launching import start_local_ranks
sys.exit(start_local_ranks([], 2, program=[sys.executable, '-c', {rank!r}], are_held=True))
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], start_new_session=True)
    _wait_for([tmp_path / f"ready{rank}" for rank in range(2)], process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 75


def test_a_second_ctrl_c_ends_all_ranks_and_the_launcher_at_once(tmp_path: Path) -> None:
    """The first is a request, here one that the ranks never get to: they hang where Python runs no handler."""
    rank = HEAD + textwrap.dedent(f"""
        import ctypes
        from dist_transformer.processes.stop_request import StopRequest
        stop = StopRequest()
        stop.listen()
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        libc.pthread_mutex_lock(mutex)
        open(f'{tmp_path}/{{rank}}.new', 'w').write(str(os.getpid()))
        os.rename(f'{tmp_path}/{{rank}}.new', f'{tmp_path}/{{rank}}')
        libc.pthread_mutex_lock(mutex)
    """)
    launcher = f"""
import sys
from dist_transformer.processes.launching import start_local_ranks
from dist_transformer.processes.stop_request import StopRequest
StopRequest().listen()  # as `train` does before it knows that it will start ranks
sys.exit(start_local_ranks([], 2, program=[sys.executable, '-c', {rank!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], start_new_session=True)
    _wait_for([tmp_path / str(rank) for rank in range(2)], process)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    for seconds in (11.0, 1.0) * 9:  # held up for long it hears of both at once, or takes the second for a first one
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    assert process.wait(10) == 128 + signal.SIGINT
    assert all(_has_ended(int((tmp_path / str(rank)).read_text())) for rank in range(2))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_program_that_a_signal_ended_in_order_was_stopped(number: int, code: int) -> None:
    """As Ctrl-C ends a verb that saves nothing on the way; HUP goes on as TERM."""
    program = f"""
import os, signal, sys
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda *_: sys.exit({code}))
os.kill(os.getppid(), {int(number)})
while True:
    signal.pause()
"""
    with forwarding_signals() as signals:
        assert run_program([sys.executable, "-c", program], signals) == 75
        signals.came.clear()
        assert run_program([sys.executable, "-c", f"raise SystemExit({code})"], signals) == code


def test_after_the_run_signals_mean_what_they_meant_before() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    assert _run("pass", 1) == 0
    assert signal.getsignal(signal.SIGUSR1) == before
