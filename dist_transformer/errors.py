"""The one family of exceptions and the exit codes of every command.

A `UserError` is something the user can fix: the command prints its message and exits 2, without a traceback. A
`MachineError` is reported in the same way, but exits 1, so that a Slurm job goes back to the queue.
Every other exception is a fault of the program: exit 1, with the traceback in the log.
"""

import sys
from contextlib import suppress
from typing import Self, TextIO

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_HANG = 70
"""The watchdog saw no progress for `training.hang_seconds` and ended the rank."""
EXIT_REQUEUE = 75
"""Stopped on request with everything saved: the same command resumes the run (EX_TEMPFAIL of sysexits.h)."""
OF_SIGBUS = "SIGBUS: a mapped file could not be read: its disk failed, it was cut short, or /dev/shm is full"


class DistTransformerError(Exception):
    """Base of all exceptions this package raises on purpose."""

    exit_code = EXIT_FAILED
    is_agreed = False
    """True if every rank raises this same error: only rank 0 prints it."""

    def agreed(self) -> Self:
        """Marks an error that every rank raises."""
        self.is_agreed = True
        return self


class UserError(DistTransformerError):
    """A mistake the user can fix. The message says what was expected, what came, where, and what to do."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """One or more problems of a configuration, all reported at once."""

    def __init__(self, problems: list[str], heading: str | None = None) -> None:
        self.problems = problems
        noun = "problem" if len(problems) == 1 else "problems"
        heading = heading or f"{len(problems)} {noun} in the configuration:"
        super().__init__("\n".join([heading, *(f"  {p}" for p in problems)]))


class MachineError(UserError):
    """A fault of the machine, not of the user: the message is enough, and starting again may help. Exit code 1."""

    exit_code = EXIT_FAILED


class DataError(UserError):
    """A corpus, a prepared shard or a tokenizer that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint or model folder that is damaged, missing, or belongs to something else."""


def say(message: object, stream: TextIO | None = None) -> None:
    """Prints a line, on standard error unless a stream is given. One that takes no more writes (a full disk, a closed
    pipe) keeps nothing from going on."""
    with suppress(OSError, ValueError):
        print(message, file=stream or sys.stderr, flush=True)
