"""The lock of a run folder: only one job works on it, and the error of a second one names the holder.

The lock is that of the file system (flock). Across machines some file systems do not keep it, or keep it for a machine
that is gone; so the holder also records its identity in `owner.json`, and touches that file every few seconds.
"""

import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from dist_transformer.errors import EXIT_USER_ERROR, MachineError, UserError, say
from dist_transformer.files import NO_LOCKS, file_clock, modified, read_json, refresh, write_json
from dist_transformer.run.folder import RunDir

BEAT_SECONDS = 5.0
STALE_BEATS = 6
"""Number of beats without a touch of its file after which a holder counts as dead."""


class RunLock:
    """Lock of a run folder: `acquire`, train, `release`. The lock of a process that dies is taken over by the next one,
    which notes in its own record, as `before_seen`, when the heartbeat of the dead one was seen last.

    `wait_seconds`: time to wait for a lock that is held; a rank that was killed may hold it for a moment.
    """

    def __init__(self, run_dir: RunDir, wait_seconds: float = 20.0, beat_seconds: float = BEAT_SECONDS) -> None:
        self._owner, self._wait_seconds, self._beat_seconds = run_dir.owner, wait_seconds, beat_seconds
        self._folder = run_dir.path
        self._lock = filelock.FileLock(run_dir.lock, fallback_to_soft=False, thread_local=False)
        self._record: dict[str, Any] = {
            "host": platform.node(),
            "boot": _boot(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "attempt": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            "token": secrets.token_hex(8),
            "started": round(time.time(), 3),
        }
        self._released = threading.Event()
        self._beating = threading.Lock()

    def acquire(self) -> None:
        """Takes the lock and begins the heartbeat. Raises UserError: another job works on the folder; MachineError: an
        earlier attempt of this job works on it, or the lock outlives its holder."""
        try:
            take(self._lock, self._wait_seconds)  # without locks the heartbeat alone decides
        except filelock.Timeout:
            raise self._refusal(self._seconds_since_beat()) from None
        if self._is_held_from_elsewhere():
            self._lock.release()
            raise self._refusal(age=0.0)
        with suppress(FileNotFoundError):
            self._record["before_seen"] = round(modified(self._owner), 3)
        write_json(self._owner, self._record)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def release(self) -> None:
        """Releases the lock at an orderly end."""
        with self._beating:
            self._released.set()
            if self._holder().get("token") in (None, self._record["token"]):  # else it was taken over
                with suppress(OSError):
                    self._owner.unlink(missing_ok=True)
        self._lock.release()

    def has_fresh_owner_elsewhere(self) -> bool:
        """True if a process on another machine, which this machine's lock may not keep out, has a fresh heartbeat."""
        age = self._seconds_since_beat() if self._holder().get("boot", _boot()) != _boot() else None
        return age is not None and abs(age) < STALE_BEATS * self._beat_seconds

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            with self._beating, suppress(OSError):  # a disk that is away; the next beat tries again
                if not self._released.is_set():
                    self._touch(self._read())

    def _touch(self, holder: dict[str, Any]) -> None:
        """Touches the file of the holder, which marks the folder as used; rewrites it if it is missing or damaged."""
        if not holder and self._folder.is_dir():  # a removed folder is not created again, maybe below a lost mount
            write_json(self._owner, self._record)
        elif holder and holder["token"] != self._record["token"]:
            say(f"{self._folder}: {_name(holder)} has taken over this run folder; this process ends")
            os._exit(EXIT_USER_ERROR)  # without a requeue: two jobs that write into one run folder would ruin it
        else:
            os.utime(self._owner)

    def _is_held_from_elsewhere(self) -> bool:
        """True if a process on another machine is alive that the file system's lock did not keep out: its file changes."""
        refresh(self._folder)  # its file may be new
        holder = self._holder()
        if not holder or (self._lock.is_locked and holder["boot"] == _boot()):  # one kernel: its lock is reliable
            return False
        with suppress(FileNotFoundError):  # it ends meanwhile
            seen = self._owner.stat().st_mtime
            rest = STALE_BEATS - (self._seconds_since_beat() or 0.0) / self._beat_seconds
            # By the clock of this machine, and two beats at least: the file's time may be by that of another one.
            until = time.monotonic() + min(max(rest, 2), STALE_BEATS) * self._beat_seconds
            while time.monotonic() < until:
                time.sleep(self._beat_seconds / 5)
                refresh(self._folder)
                if self._owner.stat().st_mtime != seen:
                    return True
        return False

    def _refusal(self, age: float | None) -> UserError:
        holder = self._holder()
        if not holder or age is None:
            return MachineError(
                f"{self._folder}: another process has locked this run folder for more than {self._wait_seconds:g} s, and "
                "does not say who it is; end it, or give this run another run.name"
            )
        name = f"{_name(holder)} works on this run folder (its last sign of life is {max(age, 0):.0f} s old)"
        if age >= STALE_BEATS * self._beat_seconds:
            return MachineError(
                f"{self._folder}: {name}: it is dead or frozen, but its lock is not free yet; start again when its node is "
                "up or known to be down"
            )
        if holder["job"] is not None and holder["job"] == os.environ.get("SLURM_JOB_ID"):
            return MachineError(f"{self._folder}: {name}: an earlier attempt of this job that has not ended yet")
        return UserError(
            f"{self._folder}: {name}; a run folder is for one job at a time. Wait for that one or stop it, or give this "
            "run another run.name"
        )

    def _holder(self) -> dict[str, Any]:
        with suppress(OSError):
            return self._read()
        return {}

    def _read(self) -> dict[str, Any]:
        """Returns the record of the holder; empty if there is none, or the file is not one of this program."""
        try:
            record = read_json(self._owner)
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) and self._record.keys() - {"before_seen"} <= record.keys() else {}

    def _seconds_since_beat(self) -> float | None:
        """Age of the heartbeat by the clock of the file system, as two machines' may differ; None without a holder."""
        with suppress(FileNotFoundError):
            return file_clock(self._folder) - self._owner.stat().st_mtime
        return None


@contextmanager
def while_nobody_trains(run_dir: RunDir) -> Iterator[bool]:
    """Keeps other processes from starting in the folder during the block; yields False if one trains there, or the lock
    cannot be taken."""
    lock = filelock.FileLock(run_dir.lock, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except (filelock.Timeout, OSError):
        yield False
        return
    try:
        yield not RunLock(run_dir).has_fresh_owner_elsewhere()
    finally:
        lock.release()


@contextmanager
def while_nobody_submits(run_dir: RunDir) -> Iterator[None]:
    """Keeps other submissions from the folder during the block; folders made for the lock go if they stay empty. Raises
    UserError: another submission works on it."""
    made = [folder for folder in (run_dir.slurm, *run_dir.slurm.parents) if not folder.exists()]
    run_dir.slurm.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(run_dir.submit_lock, fallback_to_soft=False)
    try:
        take(lock, 0)
    except filelock.Timeout:
        raise UserError(f"{run_dir.path}: another submit works on this run folder; wait until it has ended") from None
    try:
        yield
    finally:
        with suppress(OSError):
            run_dir.submit_lock.unlink(missing_ok=True)  # while it is held: no lock is taken on a file that is gone
        lock.release()
        for folder in made:  # the deepest first
            with suppress(OSError):  # not empty
                folder.rmdir()


def take(lock: filelock.BaseFileLock, wait_seconds: float) -> None:
    """Takes a lock, unless the disk keeps none. Raises filelock.Timeout if it is held."""
    try:
        lock.acquire(timeout=wait_seconds)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _name(holder: dict[str, Any]) -> str:
    job = f"job {holder['job']} (attempt {holder['attempt']})" if holder["job"] is not None else "a process"
    return f"{job} with pid {holder['pid']} on {holder['host']}"


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()
