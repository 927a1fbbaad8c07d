"""A FUSE file system that passes everything on to a real folder, except for what its control file says goes wrong.

    fuse_server.py FOLDER MOUNT_POINT CONTROL

The control file may change at any time (`fuse_disk.py` writes it):

    {"stale_seconds": 60, "faults": [{"on": ["write"], "path": "*/state_*", "error": "EIO", "times": 2}]}

A fault concerns the operations `on` (names of FUSE operations; ["*"]: all) of paths like `path` (of a rename: either
name), the first `times` of them after the control file was written (absent: all). They are late by `delay_seconds`, and
answer `error`; with `after` the operation is done all the same, as by a file server whose answer was lost.

With `stale_seconds` this mount answers as an NFS client with a cache: what it has once seen of names and attributes it
repeats for so long, whatever other machines do meanwhile. As there, opening a file shows its newest state, and an own
change of a folder forgets its listing and the attributes of its entries. Another mount of the same folder is another
machine: it has a cache and locks (flock) of its own.

Each fault that was met is a line of the file `CONTROL.met`.
"""

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mfusepy import FUSE, Operations

SEEN = {"getattr", "readdir", "access", "statfs"}
"""Operations that change nothing."""
UTIME_NOW = (1 << 30) - 1
"""Nanoseconds that mean the present."""
ATTRIBUTES = ("st_mode", "st_size", "st_uid", "st_gid", "st_nlink", "st_blocks", "st_ino")


class Faults:
    """The control file, read anew whenever it changes."""

    def __init__(self, control: Path) -> None:
        self._control, self._met = control, control.with_name(f"{control.name}.met")
        self._lock, self._version, self._left = threading.Lock(), None, []
        self.plan: dict[str, Any] = {}

    def next(self, operation: str, paths: tuple[str, ...]) -> dict[str, Any]:
        """Returns the fault that this call meets; empty if none."""
        with self._lock:
            status = self._control.stat()
            if self._version != (version := (status.st_ino, status.st_mtime_ns)):
                self._version, self.plan = version, json.loads(self._control.read_text(encoding="utf-8"))
                self._left = [fault.get("times", sys.maxsize) for fault in self.plan["faults"]]
            for number, fault in enumerate(self.plan["faults"]):
                is_meant = operation in fault["on"] or fault["on"] == ["*"]
                if is_meant and self._left[number] and any(fnmatch(path, fault["path"]) for path in paths):
                    self._left[number] -= 1
                    with self._met.open("a", encoding="utf-8") as met:
                        met.write(f"{fault.get('error', 'late')} {operation} {' '.join(paths)}\n")
                    return fault
        return {}


class Cache:
    """What a client remembers of names and attributes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float, Any]] = {}

    def ask(self, kind: str, path: str, seconds: float, look: Callable[[], Any]) -> Any:
        """Returns what is remembered, if it is not older than this, else what `look` returns (or raises)."""
        seen, value = self._known.get((kind, path), (-1.0, None))
        if not 0 <= time.monotonic() - seen < seconds:
            try:
                value = look()
            except FileNotFoundError as error:
                value = error
            self._known[kind, path] = time.monotonic(), value
        if isinstance(value, OSError):
            raise OSError(value.errno, os.strerror(value.errno or 0))
        return value

    def forget(self, path: str, is_folder_changed: bool) -> None:
        self._known.pop(("getattr", path), None)
        if is_folder_changed:
            folder = os.path.dirname(path)
            for kind, other in list(self._known):
                is_entry = kind == "getattr" and os.path.dirname(other) == folder
                if is_entry or other == folder or other.startswith(path):
                    self._known.pop((kind, other), None)


class FaultyDisk(Operations):  # type: ignore[misc]
    """The operations; `paths` begin with / below the mount point."""

    use_ns = True

    def __init__(self, folder: str, control: Path) -> None:
        self._folder, self._faults, self._cache = folder, Faults(control), Cache()

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Lets the kernel ask each time, so that this program alone decides what is stale."""
        config.entry_timeout = config.attr_timeout = config.negative_timeout = 0

    def _do(self, operation: str, do: Callable[[], Any], *paths: str) -> Any:
        fault = self._faults.next(operation, paths)
        time.sleep(fault.get("delay_seconds", 0))
        error = getattr(errno, fault["error"]) if "error" in fault else None
        if error is None or fault.get("after"):
            result = do()
            if operation not in SEEN:
                for path in paths:
                    self._cache.forget(
                        path, operation in ("create", "mkdir", "rmdir", "unlink", "rename", "link", "symlink")
                    )
        if error is not None:
            raise OSError(error, os.strerror(error))
        return result

    def _at(self, path: str) -> str:
        return self._folder + path

    def _seen(self, kind: str, path: str, look: Callable[[], Any]) -> Any:
        return self._do(
            kind, lambda: self._cache.ask(kind, path, self._faults.plan.get("stale_seconds", 0), look), path
        )

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        def look() -> dict[str, Any]:
            status = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
            times = {name: getattr(status, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {name: getattr(status, name) for name in ATTRIBUTES} | times

        found: dict[str, Any] = self._seen("getattr", path, look) if fh is None else self._do("getattr", look, path)
        return found

    def readdir(self, path: str, fh: int) -> list[str]:
        names: list[str] = self._seen("readdir", path, lambda: [".", "..", *os.listdir(self._at(path))])
        return names

    def open(self, path: str, flags: int) -> int:
        return int(self._do("open", lambda: os.open(self._at(path), flags), path))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return int(self._do("create", lambda: os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode), path))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._do("read", lambda: os.pread(fh, size, offset), path))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return int(self._do("write", lambda: os.pwrite(fh, data, offset), path))

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._do("truncate", lambda: os.truncate(self._at(path) if fh is None else fh, length), path)

    def flush(self, path: str, fh: int) -> None:
        self._do("flush", lambda: None, path)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._do("fsync", lambda: None, path)  # the folder is thrown away with the test: no real disk is waited for

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._do("fsyncdir", lambda: None, path)

    def mkdir(self, path: str, mode: int) -> None:
        self._do("mkdir", lambda: os.mkdir(self._at(path), mode), path)

    def rmdir(self, path: str) -> None:
        self._do("rmdir", lambda: os.rmdir(self._at(path)), path)

    def unlink(self, path: str) -> None:
        self._do("unlink", lambda: os.unlink(self._at(path)), path)

    def rename(self, old: str, new: str) -> None:
        self._do("rename", lambda: os.rename(self._at(old), self._at(new)), old, new)

    def symlink(self, target: str, source: str) -> None:
        self._do("symlink", lambda: os.symlink(source, self._at(target)), target)

    def readlink(self, path: str) -> str:
        return str(self._do("readlink", lambda: os.readlink(self._at(path)), path))

    def chmod(self, path: str, mode: int) -> None:
        self._do("chmod", lambda: os.chmod(self._at(path), mode), path)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        given = {} if times is None or UTIME_NOW in times else {"ns": times}
        self._do("utimens", lambda: os.utime(self._at(path), **given), path)

    def statfs(self, path: str) -> dict[str, int]:
        def look() -> dict[str, int]:
            status = os.statvfs(self._folder)
            names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_namemax")
            return {name: getattr(status, name) for name in names}

        free: dict[str, int] = self._do("statfs", look, path)
        return free


if __name__ == "__main__":
    FUSE(FaultyDisk(sys.argv[1], Path(sys.argv[3])), sys.argv[2], foreground=True, fsname="faulty")
