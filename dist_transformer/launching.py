"""Starts the ranks of one machine: a process each, that finds its place in RANK, WORLD_SIZE, MASTER_ADDR ...

exit_code = start_local_ranks(["configs/demo.yaml", "run.name=first"], num_ranks=2)
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

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
    ranks: list[subprocess.Popen[bytes]] = []
    port = _free_port()
    with _forwarding_signals(ranks):
        try:
            for rank in range(num_ranks):
                # A session of its own: Ctrl-C would else reach it from the terminal too, and count twice.
                environment = rank_environment(rank, num_ranks, port)
                ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
            return _wait_for_all(ranks, grace_seconds)
        finally:
            _kill(ranks)


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait_for_all(ranks: list[subprocess.Popen[bytes]], grace_seconds: float) -> int:
    ended: queue.Queue[int] = queue.Queue()
    for rank, process in enumerate(ranks):
        threading.Thread(target=_report_end, args=(rank, process, ended), daemon=True).start()
    first_failure: int | None = None
    deadline: float | None = None
    for _ in ranks:
        rank = _next_to_end(ended, deadline, ranks)
        code = ranks[rank].returncode
        if code not in (EXIT_DONE, EXIT_REQUEUE) and first_failure is None:
            first_failure = _named_failure(rank, code)
            deadline = time.monotonic() + grace_seconds
    return ranks[0].returncode if first_failure is None else first_failure


def _report_end(rank: int, process: subprocess.Popen[bytes], ended: queue.Queue[int]) -> None:
    process.wait()
    ended.put(rank)


def _next_to_end(ended: queue.Queue[int], deadline: float | None, ranks: list[subprocess.Popen[bytes]]) -> int:
    if deadline is not None:
        try:
            return ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            _kill(ranks)
    return ended.get()


def _named_failure(rank: int, code: int) -> int:
    if code < 0:
        print(f"rank {rank} was ended by signal {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return code


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks that still run, their loader processes included."""
    for process in ranks:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _forwarding_signals(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(_FORWARDED_AS[signal.Signals(number)])

    # One that is ignored (HUP under nohup) stays ignored.
    heard = [number for number in _FORWARDED_AS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
