"""The end of every command: an error that a user can mend is one message and an exit code, never a traceback."""

import errno
import gc
import io
import os
import sys
from collections.abc import Callable

from dist_transformer.errors import EXIT_FAILED, DistTransformerError
from dist_transformer.processes.stop_request import leave
from dist_transformer.run.outputs import told


def run_as_command(run: Callable[[], object]) -> None:
    """Runs the command, or a part of it in a process of its own; ends the process with the exit code of errors.py."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may be no text
    try:
        run()
    except DistTransformerError as error:
        if not error.is_agreed or os.environ.get("RANK", "0") == "0":
            print(f"dist-transformer: {error}", file=sys.stderr, flush=True)
        _leave(error.exit_code)
    except BrokenPipeError:
        _drop_output()  # its reader has gone: `| head`
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if error.filename is not None and error.errno is not None:
            message = told(error)
            print(f"dist-transformer: {message}", file=sys.stderr, flush=True)
            _leave(message.exit_code)
        # Of standard output: what writes files has told which.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(
            f"dist-transformer: cannot write: {error.strerror}; make room and start again", file=sys.stderr, flush=True
        )
        _drop_output()
        _leave(EXIT_FAILED)
    finally:
        gc.freeze()  # the end of the interpreter would look through all that torch is made of, for half a second


def _drop_output() -> None:
    """What waits to be written cannot be, and the end of the process would try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(code: int) -> None:
    """A rank leaves at once: tearing down its group could wait for ranks that wait for it."""
    if "RANK" in os.environ:
        sys.stdout.flush()
        leave(code)
    sys.exit(code)
