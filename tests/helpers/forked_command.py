"""The command in a fork of this process, for hundreds of runs: its exit code and what it wrote.

A fork begins in milliseconds, and what a command does to its process (signals, logging, an end at once) ends with it.
"""

import contextlib
import os
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from typing import NoReturn

import matplotlib.figure  # noqa: F401  to have it imported, and the next two: else each fork would
from hypothesis import HealthCheck, Phase, settings
from running import NOT_INHERITED

from dist_transformer.cli.main import Commands, app, run_as_command
from dist_transformer.decoding import loaded_model  # noqa: F401
from dist_transformer.tracking import mlflow_client  # noqa: F401
from dist_transformer.training import rank  # noqa: F401

dict(Commands())  # imports every verb

DONE_OR_TOLD = (0, 2)
ODD_WORDS = [
    *("", " ", "\0", "a\0b", "..", "../..", "/", "~", "~nobody/x", "x" * 300, "\u2028", "\ud800", "é", "👾"),
    *(
        "-",
        "--",
        "=",
        "a=b",
        "{}",
        "[]",
        "[",
        "{",
        "'",
        '"',
        "*x",
        "&x",
        "!!python/object:os.system",
        "!x y",
        "<<",
        "? a",
    ),
    *(
        "| ",
        "%",
        "@",
        "`",
        "nan",
        ".nan",
        "inf",
        "-.inf",
        "1e999",
        "-1",
        "0",
        "1e400",
        "0x",
        "1_",
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "1e-400",
        "true",
        "null",
        "auto",
        "s3://",
        "s3://a:b@c/d",
        "http://[",
        "https://x:y@h",
        "file:///etc",
        "sqlite:///",
    ),
    *("10:00", "99-99:99", "120G", "1" * 30 + "G", "/dev/null", "/dev/full", "/proc/self/mem"),
]


FUZZ_FACTOR = int(os.environ.get("DIST_TRANSFORMER_FUZZ", "1"))
"""Above 1: so many times the examples, and other ones at each run, as `make fuzz` does."""


def bounded(examples: int) -> settings:
    """The same examples every time, unless many are asked for, without a limit on their time."""
    return settings(
        max_examples=examples * FUZZ_FACTOR, deadline=None, derandomize=FUZZ_FACTOR == 1, database=None, print_blob=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


def run_command(*arguments: object, text: str = "") -> tuple[int, str]:
    """Exit code (minus the signal that ended it) and both outputs. `text`: standard input."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as both:
        given.write(text.encode("utf-8", "surrogateescape"))
        given.seek(0)
        child = os.fork()
        if child == 0:
            _run_and_leave([str(argument) for argument in arguments], given.fileno(), both.fileno())
        _, status = os.waitpid(child, 0)
        both.seek(0)
        return os.waitstatus_to_exitcode(status), both.read().decode("utf-8")


def _run_and_leave(arguments: list[str], given: int, both: int) -> NoReturn:
    code: object = 1
    try:
        for name in NOT_INHERITED:
            os.environ.pop(name, None)
        for number, file in enumerate((given, both, both)):
            os.dup2(file, number)
        # A server of forks that a test before this one started is no child of this process, and could not be waited for.
        forkserver._forkserver._forkserver_pid = None
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
        run_as_command(lambda: app(arguments))
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)


def must_end_in_a_message(*arguments: str, text: str = "") -> str:
    """Runs the command, which must do its work or say in a message why it does not."""
    code, output = run_command(*arguments, text=text)
    assert code in DONE_OR_TOLD, (arguments, code, output)
    assert "Traceback" not in output, (arguments, output)
    assert code == 0 or output.strip(), (arguments, "says nothing")
    return output
