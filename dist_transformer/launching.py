"""Starts the ranks of one machine: a process each, that finds its place in RANK, WORLD_SIZE, MASTER_ADDR ...

exit_code = start_local_ranks(["configs/demo.yaml", "run.name=first"], num_ranks=2)     # each imports for itself
exit_code = fork_local_ranks(train, num_ranks=2)                   # what this process has imported, they need not
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE

GRACE_SECONDS = 30.0
"""After the first failure, the time for the other ranks to notice it, write their logs and leave."""

_FORWARDED_AS = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    # A closed terminal; the ranks, in sessions of their own, would not hear of it.
    signal.SIGHUP: signal.SIGTERM,
}


class Forked:
    """A process forked from this one, which runs `work` and ends as a program does, with its SystemExit for an exit code.

    It has a session of its own. To be used as a `subprocess.Popen`, with `poll` for the main thread alone.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _work_and_leave(work)

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while it runs."""
        with suppress(ChildProcessError):  # a signal's handler has asked meanwhile
            pid, status = (0, 0) if self.returncode is not None else os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> None:
        """Until it has ended. Its number stays its own until `poll`: a signal can reach no other process."""
        with suppress(ChildProcessError):  # it was polled
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | Forked


def start_local_ranks(
    arguments: list[str], num_ranks: int, *, program: Sequence[str] = (), grace_seconds: float = GRACE_SECONDS
) -> int:
    """Runs `train ARGUMENTS` as `num_ranks` processes and waits for all of them.

    Signals to this process (USR1, USR2, TERM, INT; HUP as TERM) reach each rank once. When a rank fails, the others
    have `grace_seconds` to leave, then they are killed. Call it in the main thread.

    Args:
        program: what to run instead of this package, for tests.

    Returns:
        The exit code of the first rank that failed (1 if a signal ended it), else that of rank 0.
    """
    command = [*(program or (sys.executable, "-m", "dist_transformer", "train")), *arguments]

    def start(ranks: list[Process], environment: dict[str, str], came: list[int]) -> None:
        heard = len(came)
        # A session of its own: Ctrl-C would else reach it from the terminal too, and count twice.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        with _holding_signals():
            ranks.append(process)
            for number in came[heard:]:  # while it was started, and forwarded to those before it only
                process.send_signal(_FORWARDED_AS[signal.Signals(number)])

    return _run(start, num_ranks, grace_seconds)


def fork_local_ranks(work: Callable[[], object], num_ranks: int, *, grace_seconds: float = GRACE_SECONDS) -> int:
    """As `start_local_ranks`, with ranks forked from this process: see `may_fork`.

    Args:
        work: of each rank, in its own environment. Stop signals wait for its `StopRequest.listen`.
    """

    def rank(environment: dict[str, str]) -> None:
        os.environ.update(environment)
        work()

    def start(ranks: list[Process], environment: dict[str, str], _came: list[int]) -> None:
        _fork(ranks, partial(rank, environment))

    return _run(start, num_ranks, grace_seconds)


def fork_and_wait(work: Callable[[], object], meanwhile: Callable[[], None]) -> int:
    """Runs `work` in a process forked from this one, and `meanwhile` in this one; the exit code of `work`.

    Signals reach `work` as they do ranks. EXIT_REQUEUE where one came and it ended well all the same.
    """
    processes: list[Process] = []
    with _forwarding_signals(processes) as heard:
        try:
            _fork(processes, work)
            meanwhile()
            processes[0].wait()
            code = processes[0].poll()
        finally:
            _kill(processes)
    if code is None or code < 0:
        return EXIT_FAILED if code is None else _named_failure("the process that prepares the corpus", code)
    if heard and code == EXIT_DONE:
        print("stopped before the first step; the same command goes on", file=sys.stderr, flush=True)
        return EXIT_REQUEUE
    return code


def may_fork() -> bool:
    """Whether this process is forked whole: it has no thread but this one. A lock that another held would stay held."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # not Linux
        return False


def threads_per_rank(num_ranks: int) -> int:
    """This machine's cores shared by its ranks, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank of this machine."""
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(num_ranks)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _fork(processes: list[Process], work: Callable[[], object]) -> None:
    """Signals wait until it is among the processes that get them."""
    with _holding_signals():
        processes.append(Forked(work))


@contextmanager
def _holding_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_AS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    start: Callable[[list[Process], dict[str, str], list[int]], None], num_ranks: int, grace_seconds: float
) -> int:
    ranks: list[Process] = []
    port = _free_port()
    with _forwarding_signals(ranks) as came:
        try:
            for rank in range(num_ranks):
                start(ranks, rank_environment(rank, num_ranks, port), came)
            return _wait_for_all(ranks, grace_seconds)
        finally:
            _kill(ranks)


def _work_and_leave(work: Callable[[], object]) -> NoReturn:
    """Nothing of the process that it was forked from may run on in it: no `finally`, no end of its `with`s."""
    code = EXIT_FAILED
    try:
        os.setsid()  # Ctrl-C would else reach it from the terminal too, and count twice
        work()
        code = EXIT_DONE
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_DONE if end.code is None else EXIT_FAILED
    except BaseException:  # noqa: BLE001  (what the interpreter does with one at its end)
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait_for_all(ranks: list[Process], grace_seconds: float) -> int:
    ended: queue.Queue[int] = queue.Queue()
    for rank, process in enumerate(ranks):
        threading.Thread(target=_report_end, args=(rank, process, ended), daemon=True).start()
    codes: dict[int, int] = {}
    first_failure: int | None = None
    deadline: float | None = None
    for _ in ranks:
        rank = _next_to_end(ended, deadline, ranks)
        code = ranks[rank].poll()
        assert code is not None
        codes[rank] = code
        if code not in (EXIT_DONE, EXIT_REQUEUE) and first_failure is None:
            first_failure = _named_failure(f"rank {rank}", code)
            deadline = time.monotonic() + grace_seconds
    return codes[0] if first_failure is None else first_failure


def _report_end(rank: int, process: Process, ended: queue.Queue[int]) -> None:
    process.wait()
    ended.put(rank)


def _next_to_end(ended: queue.Queue[int], deadline: float | None, ranks: list[Process]) -> int:
    if deadline is not None:
        try:
            return ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            _kill(ranks)
    return ended.get()


def _named_failure(who: str, code: int) -> int:
    if code < 0:
        print(f"{who} was ended by signal {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return code


def _kill(ranks: list[Process]) -> None:
    """Ends the ranks that still run, their loader processes included."""
    for process in ranks:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _forwarding_signals(ranks: list[Process]) -> Iterator[list[int]]:
    """Gives the signals that have come."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for process in ranks:
            process.send_signal(_FORWARDED_AS[signal.Signals(number)])

    # One that is ignored (HUP under nohup) stays ignored.
    heard = [number for number in _FORWARDED_AS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heard}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
