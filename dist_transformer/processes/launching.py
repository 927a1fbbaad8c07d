"""Starts the ranks of one machine: a process each, which finds its position in RANK, WORLD_SIZE, MASTER_ADDR ...

exit_code = start_local_ranks(["configs/demo.yaml", "run.name=first"], num_ranks=2)     # each rank imports anew
exit_code = fork_local_ranks(train, num_ranks=2)                   # the ranks share the imports of this process
"""

import gc
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import BinaryIO

from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, OF_SIGBUS, MachineError, UserError, say
from dist_transformer.processes.children import Forked, Process, Signals, forwarding_signals, holding_signals, kill
from dist_transformer.processes.stop_request import LAUNCHER_VARIABLE, STARTED_VARIABLE, signal_at_the_end_of

GRACE_SECONDS = 30.0
"""Time for the other ranks, after the first failure, to notice it, write their logs and leave."""


def start_local_ranks(
    arguments: list[str],
    num_ranks: int,
    *,
    program: Sequence[str] = (),
    signals: Signals | None = None,
    are_held: bool = False,
    leave_together: bool = False,
) -> int:
    """Runs `train ARGUMENTS` as `num_ranks` processes and waits for all of them. Returns the exit code of the first rank
    that failed (1 if a signal ended it), else that of rank 0.

    Signals to this process (USR1, USR2, TERM, INT; HUP as TERM) reach each rank once. When a rank fails, the others
    have GRACE_SECONDS to leave, then they are killed. Call it in the main thread.

    Args:
        program: the command to run instead of this package.
        signals: result of `forwarding_signals`, where it was called before; None: it is called here.
        are_held: signals are blocked until a rank calls `StopRequest.listen`; else they end a rank that has not yet.
        leave_together: ranks wait for each other at their end, so a rank that stays after another has ended hangs.
    """
    command = [*(program or (sys.executable, "-m", "dist_transformer", "train")), *arguments]

    with nullcontext(signals) if signals else forwarding_signals() as passed_on:
        of_launcher = {LAUNCHER_VARIABLE: str(os.getpid()), STARTED_VARIABLE: str(passed_on.started)}

        def start(environment: dict[str, str]) -> Process:
            # A session of its own: else Ctrl-C would reach it from the terminal too, and count twice.
            return subprocess.Popen(command, env={**environment, **of_launcher}, start_new_session=True)

        return _run(start, num_ranks, passed_on, are_held, leave_together)


def fork_local_ranks(work: Callable[[], object], num_ranks: int, *, signals: Signals | None = None) -> int:
    """Works as `start_local_ranks`, with ranks that leave together, forked from this process: see `may_fork`.

    `work`: called in each rank, in its own environment. Stop signals are blocked until its `StopRequest.listen`.
    """

    def rank(environment: dict[str, str]) -> None:
        os.environ.update(environment)
        work()

    def start(environment: dict[str, str]) -> Process:
        return Forked(partial(rank, environment))

    with nullcontext(signals) if signals else forwarding_signals() as passed_on:
        return _run(start, num_ranks, passed_on, are_held=True, leave_together=True)


def fork_and_wait(work: Callable[[], object], meanwhile: Callable[[], None], signals: Signals) -> int:
    """Runs `work` in a process forked from this one, and `meanwhile` in this one; returns the exit code of `work`.

    Signals reach `work` as they do ranks. Returns EXIT_REQUEUE if a signal came and `work` ended without error.
    """
    code = _code_of(partial(Forked, work), signals, is_held=True, meanwhile=meanwhile)
    if signals.came and code == EXIT_DONE:
        say("stopped before the first step; the same command resumes it")
        return EXIT_REQUEUE
    return _named_failure("the process that prepares the corpus", code)


def run_program(command: Sequence[str], signals: Signals, output: BinaryIO | None = None) -> int:
    """Runs a program, which receives the signals of this process, and SIGUSR2 at its end; returns the exit code.

    EXIT_REQUEUE: a signal that came ended it. `output`: what its standard output goes into.
    """
    told = partial(signal_at_the_end_of, os.getpid())
    code = _code_of(lambda: subprocess.Popen(command, stdout=output, start_new_session=True, preexec_fn=told), signals)
    if signals.came and (code < 0 or code > 128):
        return EXIT_REQUEUE
    return _named_failure(f"{command[0]} ({' '.join(command[1:4])} ...)", code)


def may_fork() -> bool:
    """True if this process has no other thread, so that it can be forked: a lock held by another would stay held."""
    with suppress(OSError):  # not Linux
        return len(os.listdir("/proc/self/task")) == 1
    return False


@contextmanager
def importing() -> Iterator[None]:
    """Imports of the block take a fifth less time: Python does not look for garbage in what they make, then or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def threads_per_rank(num_ranks: int) -> int:
    """Number of this machine's cores for each of its ranks, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Returns the environment of one rank of this machine."""
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


def num_ranks_given(addresses: Sequence[str] = ("MASTER_ADDR", "MASTER_PORT")) -> int | None:
    """Returns WORLD_SIZE if the environment names this process as one rank of a group; None if it has no RANK. Raises
    UserError: variables are missing, or their values are no numbers of ranks. `addresses`: further required variables;
    none where the ranks of this command do not communicate."""
    if "RANK" not in os.environ:
        return None
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *addresses)}
    numbers = {name: int(text) if text.isdecimal() else -1 for name, text in given.items() if name != "MASTER_ADDR"}
    is_complete = all(given.values()) and min(numbers.values()) >= 0
    if not is_complete or max(numbers["RANK"], numbers["LOCAL_RANK"]) >= numbers["WORLD_SIZE"]:
        raise UserError(
            "the environment has RANK, so this process is one rank of a group: expected RANK and LOCAL_RANK (its number on "
            f"this machine), both from 0 to WORLD_SIZE - 1{''.join(f', {name}' for name in addresses)}; got "
            + ", ".join(f"{name}={text}" if text else f"no {name}" for name, text in given.items())
            + ". --ranks N, launch/torchrun.sh and launch/slurm_task.sh set them all; without RANK it works alone"
        )
    return numbers["WORLD_SIZE"]


def _run(
    start: Callable[[dict[str, str]], Process], num_ranks: int, signals: Signals, are_held: bool, leave_together: bool
) -> int:
    port = free_port()
    with _ended_at_the_end(signals):
        for rank in range(num_ranks):
            signals.add(partial(start, rank_environment(rank, num_ranks, port)), are_held)
        return _wait_for_all(signals.processes, leave_together)


@contextmanager
def _ended_at_the_end(signals: Signals) -> Iterator[None]:
    """Kills the processes of `signals` at the end of the block; processes started later receive only later signals."""
    try:
        yield
    finally:
        kill(signals.processes)
        with holding_signals():
            signals.processes = []


def _code_of(
    start: Callable[[], Process], signals: Signals, is_held: bool = False, meanwhile: Callable[[], None] = lambda: None
) -> int:
    """The exit code of one process, which receives `signals`; -N after signal N."""
    with _ended_at_the_end(signals):
        signals.add(start, is_held)
        meanwhile()
        [process] = signals.processes
        process.wait()
        code = process.poll()
    assert code is not None
    return code


def _wait_for_all(ranks: list[Process], leave_together: bool) -> int:
    ended: queue.Queue[int] = queue.Queue()

    def report_end(rank: int) -> None:
        ranks[rank].wait()
        ended.put(rank)

    with holding_signals():  # in these threads for good: one that the kernel gave a signal to would not wake this one
        for rank in range(len(ranks)):
            threading.Thread(target=report_end, args=(rank,), daemon=True).start()
    codes: dict[int, int] = {}
    late: list[int] = []
    first_failure: int | None = None
    deadline: float | None = None
    for _ in ranks:
        try:
            rank = ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if not late and (late := [rank for rank, process in enumerate(ranks) if process.poll() is None]):
                who, what = ", ".join(map(str, late)), "ended" if first_failure is None else "failed"
                say(f"rank {who} still ran {GRACE_SECONDS:g} s after another had {what}; killed")
            kill(ranks)
            rank = ended.get()
        code = EXIT_FAILED if rank in late else ranks[rank].poll()
        assert code is not None
        codes[rank] = code
        # A late rank is no failure if no other failed: it had finished its work before it let the others leave.
        if first_failure is None and rank not in late and code not in (EXIT_DONE, EXIT_REQUEUE):
            first_failure = _named_failure(f"rank {rank}", code)
            deadline = time.monotonic() + GRACE_SECONDS
        elif leave_together and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    num_failed = sum(code not in (EXIT_DONE, EXIT_REQUEUE) for code in codes.values())
    by_signal = [f"{rank} ({signal.Signals(-code).name})" for rank, code in codes.items() if code < 0]
    if 0 < len(by_signal) < num_failed - 1:  # it stands among the messages of all that lost it
        say(f"{num_failed} ranks failed; ended by a signal: rank {', '.join(by_signal)}")
    return codes[0] if first_failure is None else first_failure


def _named_failure(who: str, code: int) -> int:
    if code < 0:
        say(f"{who} was ended by signal {OF_SIGBUS if -code == signal.SIGBUS else signal.Signals(-code).name}")
    return EXIT_FAILED if code < 0 else code


def free_port() -> int:
    """Returns a TCP port of this machine that nobody listens on, below those that the kernel gives to whoever asks for any."""
    for port in (*random.SystemRandom().sample(range(10_000, 30_000), 100), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise MachineError(
        "127.0.0.1: no port can be had there, for the ranks of this machine to meet; is the interface lo up?"
    )
