"""Retries of failed reads, with growing pauses: a busy filesystem or network often answers the next time."""

import errno
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

READ_ATTEMPTS = 8
"""Attempts to read a row group or a remote file, 12 seconds in all: enough for a busy disk, and short beside an outage."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LAST_ATTEMPT = "after the last attempt"
OFFLINE = "OfflineModeIsEnabled"  # what the Hub's client raises with HF_HUB_OFFLINE, which no retry ends
REMOTE_ERRORS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "httpx": ("HTTPError",),
    "httpx2": ("HTTPError",),
}
"""Errors of fsspec's filesystems that are no OSError. Their packages are optional, so none is imported for them."""
BAD_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)

Result = TypeVar("Result")


def with_retries(read: Callable[[], Result], warn: Callable[[str], None]) -> Result:
    """Returns the result of `read`, tried up to READ_ATTEMPTS times with pauses of 0.1, 0.2, 0.4 ... 5 s plus up to 0.1 s.

    `warn` is called after each failed attempt but the last, whose exception is raised, and also ends the retries around.
    """
    pause, attempt = FIRST_PAUSE_SECONDS, 1
    while True:
        try:
            return read()
        except read_errors() as error:
            if attempt >= READ_ATTEMPTS or OFFLINE in repr(error) or LAST_ATTEMPT in getattr(error, "__notes__", ()):
                error.add_note(LAST_ATTEMPT)
                raise
            seconds = pause + random.uniform(0, FIRST_PAUSE_SECONDS)
            warn(f"{reason_of(error)}; attempt {attempt} of {READ_ATTEMPTS}, again in {seconds:.1f} s")
            time.sleep(seconds)
            pause, attempt = min(2 * pause, LONGEST_PAUSE_SECONDS), attempt + 1


def read_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions of reading: of the disk, the network or the bytes of a file, not of the program."""
    return (OSError, EOFError, pa.ArrowException, *_remote_errors())


def is_outage(error: BaseException) -> bool:
    """True if the disk or the network failed; else the file is missing, not permitted or damaged.

    Arrow's error for a damaged file is an OSError too, but has no error number.
    """
    error = cause_of(error)
    answer = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
    # Of the Hub, or a web server; 400 is also what aiohttp calls an answer that is no HTTP.
    if isinstance(answer, int) and answer > 400:
        return answer >= 500 or answer in (408, 425, 429)
    if isinstance(error, OSError):
        failed = error.errno is not None and error.errno not in BAD_FILE_ERRNOS
        return failed or (isinstance(error, TimeoutError | ConnectionError) and OFFLINE not in repr(error))
    return isinstance(error, tuple(_remote_errors()))


def cause_of(error: BaseException) -> BaseException:
    """Returns the actual cause: fsspec raises "no such file" for every unusable or missing answer of a web server."""
    cause = error.__cause__
    is_other = isinstance(cause, OSError) or getattr(cause, "status", 404) != 404
    return cause if isinstance(error, FileNotFoundError) and cause is not None and is_other else error


def reason_of(error: BaseException) -> str:
    """Returns the text of an exception on one line; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _remote_errors() -> Iterator[type[Exception]]:
    for module, names in REMOTE_ERRORS.items():
        if module in sys.modules:
            yield from (getattr(sys.modules[module], name) for name in names)
