"""The end of every command: an error that a user can fix is one message and an exit code, never a traceback."""

import errno
import io
import os
import sys
from collections.abc import Callable

from dist_transformer.errors import EXIT_FAILED, DistTransformerError, say
from dist_transformer.processes.stop_request import leave
from dist_transformer.run.outputs import as_message


def run_as_command(run: Callable[[], object]) -> None:
    """Runs a command, or a part of it in a new process; ends the process with an exit code of errors.py."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may be invalid text
    try:
        run()
    except DistTransformerError as error:
        if not error.is_agreed or os.environ.get("RANK", "0") == "0":
            say(f"dist-transformer: {error}")
        _leave(error.exit_code)
    except BrokenPipeError:
        _drop_output()  # the reader has ended: `| head`
        sys.exit(EXIT_FAILED)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:
            error.filename = "the current folder"  # was removed: os.getcwd() names none
        if error.filename is not None and error.errno is not None:
            message = as_message(error)
            say(f"dist-transformer: {message}")
            _leave(message.exit_code)
        # The error is of standard output: errors of other files have a file name.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        say(f"dist-transformer: cannot write: {error.strerror}; make room and start again")
        _drop_output()
        _leave(EXIT_FAILED)
    except RuntimeError as error:
        from dist_transformer.training.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        ways = "lower decoding.max_tokens (translate --max-tokens) or the beam; CUDA_VISIBLE_DEVICES= takes the CPU"
        say(f"dist-transformer: out of memory ({str(error).splitlines()[0]}): {ways}")
        _leave(EXIT_FAILED)


def _drop_output() -> None:
    """Discards buffered output, which cannot be written; the end of the process would try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(code: int) -> None:
    """Ends the process; a rank at once, because destroying its group could wait for ranks that wait for it."""
    if "RANK" in os.environ:
        leave(code)
    sys.exit(code)
