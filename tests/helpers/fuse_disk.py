"""A real file system (FUSE) that does wrong what a test asks for: `fuse_server.py`, mounted and told."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).with_name("fuse_server.py")
REQUIRED = "DIST_TRANSFORMER_REQUIRE_SERVICES"
"""With this variable set to 1 a machine that cannot mount FUSE is a failure; without it the tests are skipped."""
PATIENCE_SECONDS = 240


class FuseDisk:
    """A mount of `folder`, with its faults. Two mounts of one folder are two machines with one disk.

    Attributes:
        path: the mount point.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.path, self._folder, self._control = path, folder, path.with_name(f"{path.name}.json")
        self._met = path.with_name(f"{path.name}.json.met")
        self.set()

    def set(self, *faults: dict[str, Any], stale_seconds: float = 0) -> None:
        """From now on these go wrong, and no others; `met` begins anew."""
        self._met.write_text("", encoding="utf-8")
        temporary = self._control.with_name(f".{self._control.name}")
        temporary.write_text(json.dumps({"faults": faults, "stale_seconds": stale_seconds}), encoding="utf-8")
        temporary.replace(self._control)

    def met(self) -> list[str]:
        """The faults that were met: "EIO write /runs/a/metrics.jsonl"."""
        return self._met.read_text(encoding="utf-8").splitlines()

    @contextmanager
    def mounted(self) -> Iterator["FuseDisk"]:
        self.path.mkdir()
        command = [sys.executable, str(SERVER), str(self._folder), str(self.path), str(self._control)]
        log = self.path.with_name(f"{self.path.name}.log")
        with log.open("wb") as said:
            server = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not os.path.ismount(self.path):
                ended = server.poll() is not None or time.monotonic() > deadline
                assert not ended, f"FUSE was not mounted: {log.read_text(encoding='utf-8')}"
                time.sleep(0.01)
            yield self
        finally:
            unmounted = ["umount", "--lazy", str(self.path)]
            with suppress(OSError):
                subprocess.run(unmounted, check=False, capture_output=True)
            server.terminate()
            server.wait()


def fault(*on: str, path: str = "*", **what: Any) -> dict[str, Any]:
    """A fault of these operations, as `fuse_server.py` describes it."""
    return {"on": list(on), "path": path, **what}


def require_fuse() -> None:
    """Skips, or fails where services are required, if this machine cannot mount FUSE."""
    problem = None
    try:
        import mfusepy  # noqa: F401

        os.close(os.open("/dev/fuse", os.O_RDWR))
    except (ImportError, OSError) as error:
        problem = f"FUSE cannot be mounted here ({error}): its tests need libfuse3, mfusepy and /dev/fuse"
    if os.geteuid() != 0:
        problem = "FUSE is mounted as root here"
    if problem and os.environ.get(REQUIRED):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)
