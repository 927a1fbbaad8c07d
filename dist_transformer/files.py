"""File access for disks that may not answer at once: reads with retries, atomic writes, and file times."""

import errno
import hashlib
import json
import logging
import os
import re
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
"""Errors about the path itself (nothing there, or another kind of file): a retry cannot help."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a lock on a disk that keeps none."""
PAUSES_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Pauses between the attempts of a read that fails."""
CLOCK_SECONDS = 0.1
"""Resolution of file times, which are those of the kernel's last tick: a smaller difference means nothing."""


def patiently(path: Path, read: Callable[[], Result], final: Collection[int] = ABSENT) -> Result:
    """Returns the result of `read`, which reads `path`. Retries on transient errors of a file system: a client that
    was evicted, a server that starts again, too many open files.

    Raises:
        OSError: its number is in `final`.
        MachineError: every attempt failed with another OSError.
    """
    try:
        return repeatedly(path, read, final)
    except OSError as error:
        if error.errno in final:
            raise
        then, attempts = closed_by(error) or "Start again when its disk answers", len(PAUSES_SECONDS) + 1
        raise MachineError(f"{path}: cannot be read now ({error}), after {attempts} attempts. {then}") from error


def repeatedly(path: Path, act: Callable[[], Result], final: Collection[int], done: str = "read") -> Result:
    """Returns the result of `act`. Retries on each OSError whose number is not in `final`, and raises the last one.

    `done`: what `act` does to `path`, for the warnings.
    """
    for pause in PAUSES_SECONDS:
        try:
            return act()
        except OSError as error:
            if error.errno in final:
                raise
            log.warning("%s: %s; %s again in %g s", path, error, done, pause)
            time.sleep(pause)
    return act()


def closed_by(error: OSError) -> str:
    """Returns whose the path of a PermissionError is, or the nearest folder seen above it; "" if it is this user's own."""
    with suppress(OSError, KeyError, TypeError):  # no path; an owner whose name this machine does not know
        path = Path(os.fsdecode(error.filename)).absolute()
        found = next(each for each in (path, *path.parents) if os.path.exists(each))
        if isinstance(error, PermissionError) and found.stat().st_uid != os.geteuid():
            return f"{found} belongs to {found.owner()}: ask for access (chmod), copy it (cp -r), or give another"
    return ""


def is_file(path: Path, final: Collection[int] = ABSENT) -> bool:
    """True if `path` is a regular file; retried as by `patiently`: a fault of the machine does not count against the file."""
    try:  # from Python 3.14 on pathlib's own hides every error
        return stat.S_ISREG(patiently(path, path.stat, final).st_mode)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise


def file_clock(folder: Path) -> float:
    """Unix seconds by the clock that times the files of this folder: a file server's may differ from this machine's.

    Creates a file without a name where the file system supports that, so that the folder stays as it was.
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


def refresh(folder: Path) -> None:
    """Makes the client of a file server look anew at `folder` and at the entries in it.

    An NFS client answers from its cache, for up to a minute, and does not see what other machines did meanwhile; after
    a change of its own it asks the server. (The file without a name of `file_clock` is not to be had on NFS.)
    """
    with suppress(OSError):
        file_clock(folder)


def modified(path: Path) -> float:
    """Modification time of a file in unix seconds by this machine's clock; by the file server's where nothing can be
    written to the folder to compare the two."""
    changed, ahead = path.stat().st_mtime, 0.0
    with suppress(OSError):
        ahead = file_clock(path.parent) - time.time()
    return changed - ahead if abs(ahead) > CLOCK_SECONDS else changed


MISPLACED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM,
             errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ENOSYS, errno.EOPNOTSUPP)  # fmt: skip
"""Errors of a path, or of a disk that lacks the operation, which the user has to fix; other errors are transient."""
LEFT_OVER = re.compile(r"\..+\.\d+\.\d+\.tmp", re.DOTALL)
"""Names of the temporary files of `replacing`, which a process leaves that is killed before it renames one."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces `path` by `text` in one rename; a reader sees the old file or the new one, never a part. Retries on
    transient errors.

    `mode`: permissions of a new file, before the umask.
    """

    def write() -> None:
        with replacing(path) as temporary:
            temporary.touch(mode)
            temporary.write_text(text, encoding="utf-8")

    repeatedly(path, write, (*MISPLACED, *FULL), "written")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, by `write_text`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError for text that is not JSON, or that is nested too deeply to be ours."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises OSError, and ValueError for a file that is not JSON."""
    return parse_json(path.read_text(encoding="utf-8"))


def read_json_patiently(path: Path) -> Any:
    """Reads a JSON file as `patiently`, whose errors it raises, and those of `read_json`."""
    return patiently(path, lambda: read_json(path))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is flushed to disk and renamed over `path`, whose rights it gets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = os.fsdecode(os.fsencode(path.name)[:200])  # of the 255 bytes that a name may have
    temporary = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        flush_to_disk(temporary)
        with suppress(OSError):  # nothing is there, a disk without modes, or a group that this user is not in
            temporary.chmod(path.stat().st_mode & 0o777)
            os.chown(temporary, -1, path.stat().st_gid)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    except OSError as error:
        if error.errno is not None:  # only that of an opening names a file by itself
            error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def share_as_folder(path: Path) -> None:
    """Makes the file readable for everyone who may read its folder: safetensors makes files for their owner only."""
    with suppress(OSError):  # a disk that keeps no permissions
        path.chmod(path.parent.stat().st_mode & 0o666)


def flush_to_disk(path: Path) -> None:
    """fsync of a file or a folder: after it, a power loss does not take the data (or the rename) back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # disks that flush files alone
            raise
    finally:
        os.close(descriptor)
