"""Stacks of each rank, read from outside of its process: no rights to trace a process are needed.

    register()                              # in the rank, early
    for dump in dump_local(job): ...        # on the same machine, as the same user

A rank has faulthandler write the stacks of all threads into a private file when a signal comes. The handler is C: it
answers while Python waits in a collective or in any other call. `python -m dist_transformer.processes.stacks JOB` prints
a line of JSON for each line of each rank of this machine; `dist-transformer stacks` starts it on each node. Any Python 3
can run it.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import platform
import signal
import stat
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

SIGNAL = signal.SIGRTMIN + 5
"""A signal that no library uses. Its default action ends a process: it is sent only to processes that registered."""

FOLDER = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp")
"""Folder of the stacks, in memory: enroot gives a container another /tmp. Not TMPDIR, which may be set differently for the
ranks than for the asking process."""

ANSWER_SECONDS = 5.0
QUIET_SECONDS = 0.2
"""Time without growth after which a file is complete."""
_ENDED = "it has ended meanwhile"


@dataclass(frozen=True)
class RankProcess:
    """A rank of this user on this machine that has registered. `job`: number of the Slurm job, else a text that the ranks
    of one local start have in common."""

    pid: int
    rank: int
    job: str
    file: Path


@dataclass(frozen=True)
class Dump:
    """Stacks of one rank. `text`: the stacks of all threads, or the reason why there are none."""

    rank: int
    host: str
    pid: int
    text: str


def register(folder: Path = FOLDER) -> None:
    """Makes this process answer `dump_local` from now on. For ranks only, not for loader processes."""
    pid, rank = os.getpid(), int(os.environ.get("RANK", "0"))
    path = folder / f"{_prefix()}{pid}.txt"
    rank_processes(folder)  # removes the files of ranks that were killed or ended by os._exit
    about = {"pid": pid, "started": _started(pid), "rank": rank, "job": _job(pid)}
    descriptor: int | None = None
    try:
        path.unlink(missing_ok=True)  # of an earlier process with the same number
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.write(descriptor, (json.dumps(about) + "\n").encode())
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
    except OSError as error:
        log.warning("stacks     %s: %s: `dist-transformer stacks` will not see this rank", path, error.strerror)
        if descriptor is not None:
            os.close(descriptor)
            path.unlink(missing_ok=True)
        return
    atexit.register(path.unlink, missing_ok=True)


def rank_processes(folder: Path = FOLDER) -> list[RankProcess]:
    """Returns the ranks that are alive; removes the files of dead ones."""
    found = [_read(path) for path in folder.glob(f"{_prefix()}*.txt")]
    return sorted((process for process in found if process), key=lambda process: process.rank)


def dump_local(job: str, folder: Path = FOLDER) -> list[Dump]:
    """Returns the stacks of this machine's ranks of a job. Takes at most about ANSWER_SECONDS."""
    asked = []
    for process in (process for process in rank_processes(folder) if process.job == job):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            size = process.file.stat().st_size
            os.kill(process.pid, SIGNAL)
            asked.append((process, size))
    end = time.monotonic() + ANSWER_SECONDS
    return [Dump(process.rank, host_name(), process.pid, _answer(process, size, end)) for process, size in asked]


def host_name() -> str:
    """Name of this machine, under Slurm the one that Slurm uses."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def main(arguments: list[str], out: TextIO, folder: Path = FOLDER) -> None:
    """Prints a line for this node, then one for each line of each rank: srun mixes long lines of several nodes."""
    dumps = dump_local(arguments[0], folder)
    out.write(json.dumps({"node": host_name(), "ranks": len(dumps)}) + "\n")
    for dump in dumps:
        for line in dump.text.splitlines(keepends=True):
            out.write(json.dumps(asdict(replace(dump, text=line))) + "\n")
    out.flush()


def _prefix() -> str:
    # Machines and PID namespaces may share the folder, and their processes have the same pids.
    namespace = Path("/proc/self/ns/pid").resolve().name.strip("pid:[]")
    return f"dist-transformer-stacks-{namespace}-{os.getuid()}-{platform.node()}-"


def _job(pid: int) -> str:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("SLURM_JOB_ID") or (f"pid {pid}" if port is None else f"{address}:{port}")


def _started(pid: int) -> str | None:
    """Start of the process in the kernel's ticks; None if there is no such process (any more)."""
    fields = _process_fields(pid)
    return fields[19] if fields and fields[0] != "Z" else None


def _process_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; the second is a name with arbitrary characters."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _read(path: Path) -> RankProcess | None:
    try:
        about = path.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
            return None
        with path.open() as file:
            first = json.loads(file.readline())
        pid = int(first["pid"])
        if first["started"] is None or _started(pid) != first["started"]:
            path.unlink(missing_ok=True)
            return None
        return RankProcess(pid, int(first["rank"]), str(first["job"]), path)
    except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or half written
        return None


def _answer(process: RankProcess, size_before: int, end: float) -> str:
    size, quiet_since = size_before, time.monotonic()
    while time.monotonic() < end:
        try:
            now = process.file.stat().st_size
        except OSError:
            return _ENDED
        if now != size:
            size, quiet_since = now, time.monotonic()
        elif size > size_before and time.monotonic() - quiet_since >= QUIET_SECONDS:
            break
        time.sleep(0.02)
    if size == size_before:
        state = (_process_fields(process.pid) or ["gone"])[0]
        why = {"D": "it waits in the kernel, for a disk or a device", "T": "it was stopped by a signal"}
        return f"no answer within {ANSWER_SECONDS:g} s: {why.get(state, f'process state {state}')}"
    try:
        with process.file.open("rb") as file:
            file.seek(size_before)
            threads = file.read().decode(errors="replace").strip().split("\n\n")
    except OSError:
        return _ENDED
    return "\n\n".join(reversed(threads))  # the training thread is written last, and is the one a reader looks for


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdout)
