"""A filesystem for fsspec that serves local files slowly and with failures: faulty:///absolute/path/of/a/file.

With this folder on PYTHONPATH every process knows it, by the entry point beside this file. What goes wrong is said by a
`faults.json` in the folder of the file that is read, and may change while it is served:

    {"*.parquet": {"delay_seconds": 0.01}, "train-00001.parquet": {"failures": 2}}

The first pattern that fits a file's name counts. Per file: `delay_seconds` before every open and read; `failures`: so
many opens and reads fail in each process, then all is well; `always`: every open and read fails; `fail_after_bytes`: what
lies beyond cannot be read; `missing`: there is no such file.
"""

import json
import os
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

PLAN_NAME = "faults.json"


class FaultyFileSystem(AbstractFileSystem):
    """Read only. `calls` counts the opens and reads of each path by this process."""

    protocol = "faulty"
    root_marker = "/"
    calls: ClassVar[Counter[str]] = Counter()
    failures: ClassVar[Counter[str]] = Counter()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if Path(path).is_file():
            return [self.info(path)] if detail else [path]
        entries = sorted(os.path.join(path, name) for name in os.listdir(path) if name != PLAN_NAME)
        return [self.info(entry) for entry in entries] if detail else entries

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if faults_of(path).get("missing"):
            raise FileNotFoundError(path)
        status = os.stat(path)
        kind = "directory" if Path(path).is_dir() else "file"
        return {"name": path, "size": status.st_size, "type": kind, "mtime": status.st_mtime}

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> "FaultyFile":
        assert mode == "rb", "read only"
        self.go_wrong(path, 0)
        return FaultyFile(self, path, mode, block_size or "default", **options)

    def go_wrong(self, path: str, end: int) -> None:
        """Sleeps, and fails if that is planned for a read of `path` up to byte `end`."""
        self.calls[path] += 1
        faults = faults_of(path)
        time.sleep(faults.get("delay_seconds", 0))
        if faults.get("always") or end > faults.get("fail_after_bytes", end):
            raise OSError(f"{path}: the remote does not answer")
        if self.failures[path] < faults.get("failures", 0):
            self.failures[path] += 1
            raise TimeoutError(f"{path}: the remote did not answer in time")


class FaultyFile(AbstractBufferedFile):
    """A file of `FaultyFileSystem`."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.go_wrong(self.path, end)
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


def faults_of(path: str) -> dict[str, Any]:
    """What is planned for a file."""
    plan = Path(path).parent / PLAN_NAME
    faults: dict[str, dict[str, Any]] = json.loads(plan.read_text(encoding="utf-8")) if plan.is_file() else {}
    return next((value for pattern, value in faults.items() if fnmatch(Path(path).name, pattern)), {})
