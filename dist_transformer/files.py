"""Reads of a disk that may not answer at once, and the time of its files by its own clock."""

import errno
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dist_transformer.errors import MachineError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors that say what is at a path, or that nothing is: content, whatever the machine does."""
PAUSES_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Between the attempts to read what the disk does not give."""
CLOCK_SECONDS = 0.1
"""File times are those of the kernel's last tick: a difference of less says nothing."""


def patiently(path: Path, read: Callable[[], Result], final: Collection[int] = ABSENT) -> Result:
    """What `read` returns of `path`. What a file system answers for a moment is waited out: a client that was evicted, a
    server that starts again, too many open files.

    Raises:
        OSError: with one of the numbers `final`.
        MachineError: any other, at every attempt.
    """
    for pause in (*PAUSES_SECONDS, None):
        try:
            return read()
        except OSError as error:
            if error.errno in final:
                raise
            if pause is None:
                raise MachineError(
                    f"{path}: cannot be read now ({error}), after {len(PAUSES_SECONDS) + 1} attempts. Start again when its "
                    "disk answers"
                ) from error
            log.warning("%s: %s; read again in %g s", path, error, pause)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def is_file(path: Path) -> bool:
    """Whether it is a file that can be read, patiently: an error of the machine is none of the file's."""
    try:
        return stat.S_ISREG(patiently(path, path.stat).st_mode)
    except OSError:
        return False


def file_clock(folder: Path) -> float:
    """Unix seconds by the clock that times the files of this folder: a file server's may differ from this machine's.

    Asked with a file that never has a name where the file system has such, so that the folder stays as it was.
    """
    with suppress(OSError):
        unnamed = os.open(folder, os.O_TMPFILE | os.O_WRONLY)
        try:
            return os.fstat(unnamed).st_mtime
        finally:
            os.close(unnamed)
    probe = folder / f".clock.{secrets.token_hex(8)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def modified(path: Path) -> float:
    """When a file was changed, in unix seconds by this machine's clock, as far as its folder lets its clock be asked."""
    changed = path.stat().st_mtime
    try:
        ahead = file_clock(path.parent) - time.time()
    except OSError:
        return changed
    return changed - ahead if abs(ahead) > CLOCK_SECONDS else changed


MISPLACED = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
)
"""Errors of a path, or of a disk that cannot do it at all, which a person mends; the others come and go."""


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace `path` by `text` in one rename; a reader sees the old file or the new one, never a part.

    `mode`: of the file, less what the umask takes.
    """
    with replacing(path) as temporary:
        temporary.touch(mode)
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for what is no JSON, or nested too deeply to be ours."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Raises OSError, and ValueError for what is no JSON."""
    return parse_json(path.read_text(encoding="utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is flushed to disk and renamed over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def share_as_folder(path: Path) -> None:
    """Lets those read the file who may read its folder: safetensors makes files for their owner only."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def flush_to_disk(path: Path) -> None:
    """fsync of a file or a folder: after it, a power loss does not take the data (or the rename) back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
