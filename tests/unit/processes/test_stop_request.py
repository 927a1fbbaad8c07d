"""Stops, with real signals to real processes: one is a request, the same one again is an end, and so is a time limit."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import without

from dist_transformer.processes.stop_request import STARTED_VARIABLE, STOP_SIGNALS, StopRequest

PROGRAM = """
import signal, sys
from dist_transformer.processes import stop_request
stop_request.REPEAT_SECONDS = {repeat_seconds}
stop = stop_request.StopRequest()
stop.listen()
{body}
"""
ANSWERING = """
print("ready", flush=True)
for line in sys.stdin:
    print(stop.reason(), flush=True)
"""
HANGING = """
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever; Python runs no handler meanwhile, as in a collective
"""
AT_ONCE = (0.0, 600.0)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that listens; it has answered "ready" when it is handed over."""
    started = []

    def begin(body: str = ANSWERING, **environment: str) -> "subprocess.Popen[str]":
        program = PROGRAM.format(body=textwrap.dedent(body), repeat_seconds=AT_ONCE)
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        variables = {**without(["RANK"]), **environment}
        process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, env=variables, **pipes)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        with process:  # closes its pipes and waits
            pass


def reason_of(process: "subprocess.Popen[str]") -> str:
    """What the process says when asked; signals sent before were delivered by then."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_same_signal_again_ends_the_process_at_once(start, number):
    process = start()
    process.send_signal(number)
    assert reason_of(process) == f"signal {number.name}"
    process.send_signal(number)
    assert process.wait(120) == 128 + number


@pytest.mark.parametrize(("environment", "is_heard"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False)])
def test_a_person_is_told_what_a_signal_does_and_by_one_rank_only(start, environment, is_heard):
    process = start(**environment)
    process.send_signal(signal.SIGINT)
    assert reason_of(process) == "signal SIGINT"
    first = process.stderr.readline() if is_heard else ""
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 128 + signal.SIGINT
    said = ["SIGINT: saving at the end of this step", "SIGINT again: ended at once"] if is_heard else []
    lines = [first, *process.stderr.readlines()] if is_heard else process.stderr.readlines()
    assert [line.partition(";")[0] for line in lines] == said


def test_a_person_is_told_what_the_process_does_which_need_not_save(capfd, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    StopRequest(answer="stopping after this batch")._end_if_repeated(signal.SIGTERM, 0.0)
    assert capfd.readouterr().err.startswith("SIGTERM: stopping after this batch; the same signal again within 10 s")


def test_an_end_does_not_wait_for_a_reader_of_what_is_said(start):
    """A pipe that is full, such as that of a pager."""
    fills = (
        "import os\nos.set_blocking(2, False)\ntry:\n    while os.write(2, bytes(4096)): pass\nexcept OSError: pass\n"
    )
    process = start(fills + "os.set_blocking(2, True)" + ANSWERING)
    process.send_signal(signal.SIGINT)
    assert reason_of(process) == "signal SIGINT"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 128 + signal.SIGINT


def test_a_second_signal_ends_a_process_that_hangs_in_a_collective(start):
    process = start(HANGING)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)  # the first may still be on its way: the kernel makes one of two
    assert process.wait(120) == 128 + signal.SIGINT


def test_other_signals_after_the_first_do_not_cost_the_save(start):
    """Slurm: USR1 before the time limit, TERM at it."""
    process = start()
    for number in STOP_SIGNALS:
        process.send_signal(number)
        assert reason_of(process) == "signal SIGUSR1"
    process.send_signal(STOP_SIGNALS[-1])
    assert process.wait(120) == 128 + STOP_SIGNALS[-1]


def test_a_folder_for_temporary_files_may_have_a_long_name(start, tmp_path):
    """The address of a socket has 107 bytes; the sockets' folder is removed at the end."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    told = """
    import multiprocessing.util, tempfile
    print("ready", multiprocessing.util.get_temp_dir(), tempfile.gettempdir(), sep="\\n", flush=True)
    """
    process = start(told, TMPDIR=str(long))
    sockets, temporary = process.stdout.read().split()
    assert process.wait(120) == 0
    assert (Path(sockets).parent, temporary) == (Path("/tmp"), str(long))
    assert not Path(sockets).exists()


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [([0, 0.4], 0), ([0, 0.6], 1), ([0, 9.9], 1), ([0, 10.1], 0), ([0, 0.4, 0.6], 1), ([0, 12, 13], 1)],
)
def test_the_time_between_two_signals_decides_whether_a_person_insists(monkeypatch, seconds, ends):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = StopRequest()
    for now in seconds:
        stop._end_if_repeated(signal.SIGTERM, 1000.0 + now)
        stop._end_if_repeated(signal.SIGUSR1, 1000.0)  # another one, whose time does not matter
    assert codes == [128 + signal.SIGTERM] * ends


def test_a_signal_that_was_given_another_handler_is_no_longer_ours(start):
    """As in the launcher, which forwards: its ranks must end before it does."""
    process = start("signal.signal(signal.SIGINT, lambda number, frame: None)" + ANSWERING)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        assert reason_of(process) == "None"
    process.send_signal(signal.SIGTERM)
    assert reason_of(process) == "signal SIGTERM"
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM


def test_from_the_time_limit_on_there_is_a_request_that_names_it_whatever_the_clock_is_set_to(monkeypatch):
    now = {"time": 5000.0, "monotonic": 1000.0}
    for name in now:
        monkeypatch.setattr(time, name, lambda name=name: now[name])
    monkeypatch.setenv(STARTED_VARIABLE, "4940")  # of the command that started this rank
    stop = StopRequest()
    stop.end_after(3600)
    stop.end_after(7200, "another")
    for now["time"] in (5000.0, 9.0, 10.0**10):
        now["monotonic"] = 1000.0 + 3539.9
        assert stop.reason() is None
        for now["monotonic"] in (1000.0 + 3540, 10.0**6):
            assert stop.reason() == "time limit of training.max_hours"


def test_a_rank_counts_its_time_and_takes_a_stop_file_from_the_start_of_the_command(monkeypatch, tmp_path):
    (tmp_path / "stop").touch()
    began = os.stat(tmp_path / "stop").st_mtime
    for started, is_meant in ((began - 1, True), (began + 1, False)):
        (tmp_path / "stop").touch()
        os.utime(tmp_path / "stop", (began, began))
        monkeypatch.setenv(STARTED_VARIABLE, str(started))
        stop = StopRequest()
        stop.watch_file(tmp_path / "stop")
        assert stop.started == started
        assert (stop.reason() is not None) == is_meant


@pytest.mark.parametrize("ahead", [-300.0, 300.0])
def test_the_age_of_a_stop_file_is_by_the_clock_of_its_file_system(monkeypatch, tmp_path, ahead):
    """A file server whose clock is ahead of this machine's would else answer an old request at every start."""
    monkeypatch.delenv(STARTED_VARIABLE, raising=False)
    of_server = time.time
    monkeypatch.setattr(time, "time", lambda: of_server() - ahead)
    for seconds, is_meant in ((-60, False), (60, True)):
        stop = StopRequest()
        (tmp_path / "stop").touch()
        os.utime(tmp_path / "stop", (of_server() + seconds, of_server() + seconds))
        stop.watch_file(tmp_path / "stop")
        assert (stop.reason() is not None) == is_meant
        assert [path.name for path in tmp_path.iterdir()] == ["stop"] * is_meant
