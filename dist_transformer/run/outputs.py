"""Checks of the paths that a command writes to. Nothing that belongs to a user is removed or overwritten.

docs/architecture.md, "Files of users", has the rule, for every command: a path is free, is an output of this program of the
kind to be written, or is refused before anything is computed.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_transformer.config.yaml_positions import read_yaml
from dist_transformer.errors import ConfigError, MachineError, UserError
from dist_transformer.files import FULL, LEFT_OVER, MISPLACED, NO_LOCKS, closed_by, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record_patiently

STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")
"""Names of open streams, whatever they are: a redirected standard output is a regular file."""
SECTIONS = {"run", "data", "tokenizer", "model", "optimizer", "training"}
"""Sections of a configuration: the one that a run keeps has all of them, one that a user writes has a few."""
NAMES_SHOWN = 3


def never(_: Path) -> bool:
    """Returns False: an `is_own` for outputs that may never be replaced."""
    return False


def check_output(path: Path, kind: str, is_own: Callable[[Path], bool] = never, *, is_file: bool = False) -> None:
    """Refuses a path that may not be written, before anything is computed for it.

    Args:
        kind: name of the output, as "a model folder".
        is_own: returns True if the label of an existing output shows that this program wrote it, and of this kind.
        is_file: True if the output is a file, else it is a folder.

    Raises:
        UserError: something else is there, the path is among the checkpoints of a run, or it cannot be written.
        MachineError: the disk fails.
    """
    with writing(path):
        found = None
        with suppress(FileNotFoundError):
            found = path.stat()
        if found and not is_stream(path):
            is_folder = stat.S_ISDIR(found.st_mode)
            is_free = not (is_folder or found.st_size) if is_file else holds_only(path)
            if not is_free and ((is_file and is_folder) or not is_own(path)):
                if is_own is not never and is_folder != is_file:  # its label may be closed to this user
                    for label in path.iterdir() if is_folder else [path]:
                        if label.exists() and not os.access(label, os.R_OK):
                            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(label))
                own = "" if is_own is never else f", an empty one or {kind} of this program"
                raise UserError(
                    f"{path}: is there already ({_what_is_there(path, found)}), expected a new path{own}: it is not "
                    "written over; give another path, or move it away"
                )
        if found is None or not is_stream(path):
            real = Path(os.path.realpath(path))
            above = [(folder, RunDir(folder.parent)) for folder in (real, *real.parents)]
            if any(folder == run_dir.checkpoints and run_dir.config.is_file() for folder, run_dir in above):
                raise UserError(
                    f"{path}: lies among the checkpoints of a run, which are kept for resumes; give another path"
                )
            folder = next(folder for folder in (real, *real.parents) if folder.is_dir())
            try:
                tempfile.TemporaryFile(dir=folder).close()  # as root, and on some disks, only this shows it
            except OSError as error:
                error.filename = str(folder)
                raise


def holds_only(folder: Path, paths: Collection[Path] = ()) -> bool:
    """True if it is a folder with nothing but these paths and temporary files that a killed process has left."""
    return folder.is_dir() and all(path in paths or LEFT_OVER.fullmatch(path.name) for path in folder.iterdir())


def is_stream(path: Path) -> bool:
    """True if the path is a device, a pipe or an open stream: written to, and never replaced."""
    is_other = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return is_other or str(path.absolute()).startswith(STREAMS)


def write_output(path: Path, text: str) -> None:
    """Writes text to a path given by the user: a file completely or not at all, through links; a device or pipe as is.
    Raises as `writing`."""
    with writing(path):
        if is_stream(path):
            path.write_text(text, encoding="utf-8")
        else:
            write_text(Path(os.path.realpath(path)), text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError in a block that writes `path` into one of our errors, unless it is about a file elsewhere.

    Raises:
        UserError: nothing can be written at this path, or its disk keeps no locks.
        MachineError: the disk is full, or fails.
    """
    try:
        yield
    except BrokenPipeError:  # the reader has ended, which is no fault: cli/main.py
        raise
    except OSError as error:
        written = error.filename2 or error.filename  # an error of a copy has both of its names
        if written is not None and not _are_near(Path(os.fsdecode(written)), path):
            raise
        if error.errno in NO_LOCKS:
            wanted = "one that does (Lustre: mounted with flock); give data.prepared or --output there"
            raise UserError(f"{path}: its disk keeps no file locks ({error.strerror}): expected {wanted}") from error
        said = f"{path}: cannot be written ({error}): "
        if is_misplaced(error):
            raise UserError(said + (closed_by(error) or "expected a path to write to; give another")) from error
        raise MachineError(f"{said}make room, or wait for the disk, and start again") from error


def is_misplaced(error: BaseException) -> bool:
    """True if it is an error of a path, which the user has to fix, and not of the machine."""
    return isinstance(error, OSError) and error.errno in MISPLACED


def as_message(error: OSError) -> UserError:
    """Returns an OSError as one of our errors: UserError for a path that the user has to fix, else MachineError."""
    said = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    said += f"{error.strerror or error}: "
    if error.filename is not None and is_misplaced(error):
        wanted = "expected a path that exists, is of the right kind and is open to this user; give another, or mend it"
        return UserError(said + (closed_by(error) or wanted))
    fault = "a fault of the disk or of the machine; start again when it is repaired"
    return MachineError(said + ("make room and start again" if error.errno in FULL else fault))


def check_run_folder(run_dir: RunDir) -> None:
    """Refuses a run folder that has files of the names that a run writes, but from another source. Raises UserError: a
    file there would be overwritten and is not known to be a run's, `checkpoints` is a file, or what continues is closed."""
    if os.path.exists(run_dir.checkpoints) and not run_dir.checkpoints.is_dir():
        raise UserError(f"{run_dir.checkpoints}: is a file, expected the folder of checkpoints: move it away")
    changed = [run_dir.config, run_dir.state, run_dir.metrics, run_dir.samples, run_dir.audit, run_dir.divergence]
    changed += [run_dir.submitted_script, run_dir.job, run_dir.snapshot, run_dir.report, run_dir.plugin, run_dir.owner]
    changed += [run_dir.stop_file, run_dir.tracking, run_dir.tracking_events]
    there = [str(path.relative_to(run_dir.path)) for path in changed if path.exists() and path.stat().st_size]
    if there and not is_own_run(run_dir):
        raise UserError(
            f"{run_dir.path}: holds {', '.join(there)}, but is no run folder (no run.json or config.yaml that this program "
            "wrote): nothing in it is written over; give another run.name or run.root, or move it away"
        )
    continued = [run_dir.checkpoints, run_dir.log, run_dir.metrics, run_dir.samples, run_dir.audit, run_dir.history]
    for path in (*continued, run_dir.tracking_events):  # what is replaced by a rename may be closed
        with writing(path):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def is_own_run(run_dir: RunDir) -> bool:
    """True if the files of the folder show that this program wrote it."""
    notes = read_record_patiently(run_dir.state).keys() | read_record_patiently(run_dir.job).keys()
    is_begun = any(run_dir.checkpoints.glob("step_*")) or (run_dir.snapshot / "dist_transformer").is_dir()
    if is_begun or notes & {"run_id", "state", "job_id"} or "boot" in read_record_patiently(run_dir.owner):
        return True
    with suppress(ConfigError):
        return run_dir.config.is_file() and read_yaml(run_dir.config).values.keys() >= SECTIONS
    return False


def _what_is_there(path: Path, found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return f"a file of {found.st_size:,} bytes"
    names = sorted(entry.name for entry in path.iterdir())
    return f"a folder with {', '.join(names[:NAMES_SHOWN]) or 'nothing'}{', ...' if len(names) > NAMES_SHOWN else ''}"


def _are_near(other: Path, path: Path) -> bool:
    """True if `other` is `path`, beside or below it, or a folder above it."""
    other, path = Path(os.path.abspath(other)), Path(os.path.abspath(path))  # without ".."
    return other.is_relative_to(path.parent) or path.is_relative_to(other)
