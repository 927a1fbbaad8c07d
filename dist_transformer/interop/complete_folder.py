"""Atomic writing of folders."""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from dist_transformer.errors import MachineError
from dist_transformer.files import flush_to_disk
from dist_transformer.run.outputs import check_output, never, writing

log = logging.getLogger(__name__)


@contextmanager
def complete_folder(
    folder: Path, kind: str, is_own: Callable[[Path], bool] = never, own_files: Sequence[str] = ()
) -> Iterator[Path]:
    """Yields an empty folder next to `folder`, which at the end is renamed to it and replaces an older one.

    If the block raises, `folder` stays unchanged. Subfolders are not allowed.

    Args:
        kind, is_own: as for check_output, to recognise an older folder.
        own_files: files of an older folder that go, besides those that the block writes anew; others stay in it.

    Raises:
        UserError: the path holds something else or cannot be written.
        MachineError: the disk is full, or fails.
    """
    check_output(folder, kind, is_own)
    real = Path(os.path.realpath(folder))  # a link stays a link
    temporary = real.with_name(f".{real.name}.{time.time_ns()}.tmp")
    with writing(folder):
        try:
            _clear_up(real, is_own)
            real.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            for path in temporary.iterdir():
                flush_to_disk(path)
            flush_to_disk(temporary)
            check_output(folder, kind, is_own)  # the block may have taken hours
            _replace(real, temporary, own_files)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if os.path.exists(temporary):
                log.warning("%s: cannot be removed; it is not needed any more", temporary)
            with suppress(OSError, MachineError):  # hides no error of the block; no fault of a complete folder
                _clear_up(real, is_own)  # the older one is back if the new one could not get its name


def _clear_up(folder: Path, is_own: Callable[[Path], bool]) -> None:
    """Brings back an older folder that a killed process had moved aside; removes other rests after a day."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.\d+\.(old|tmp)")
    left = [each for each in folder.parent.glob(f".{escape(folder.name)}.*") if pattern.fullmatch(each.name)]
    aside = [each for each in left if each.suffix == ".old" and is_own(each)]
    if aside and not folder.exists():
        os.rename(max(aside, key=lambda old: old.stat().st_ctime), folder)
    with suppress(OSError):  # another process removes them
        for each in left:
            if (folder.exists() or each.suffix == ".tmp") and time.time() - each.stat().st_ctime > 24 * 3600:
                shutil.rmtree(each)


def _replace(folder: Path, temporary: Path, own_files: Sequence[str]) -> None:
    """Renames `temporary` to `folder`, with what it lacks of an older folder but for `own_files`, whenever it is killed."""
    old, gone = temporary.with_suffix(".old"), {str(folder): [*own_files, *os.listdir(temporary)]}
    if folder.exists():
        try:
            shutil.copytree(folder, temporary, True, lambda at, _: gone.get(at, []), _link, dirs_exist_ok=True)
        except shutil.Error as error:  # of a folder that is there: of its permissions, which not all disks keep
            if failed := [why for at, to, why in error.args[0] if not os.path.isdir(at) or not os.path.isdir(to)]:
                raise OSError(failed[0]) from error
        os.rename(folder, old)
    os.rename(temporary, folder)
    try:
        flush_to_disk(folder.parent)
    except OSError as error:  # it has its name; an older one stays for a day
        log.warning("%s: is written, but its name is not flushed to the disk: %s", folder, error)
        return
    with suppress(OSError):
        old.rename(temporary)  # to be removed under that name: half of it must not be brought back


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the disk has no hard links, or not for this user
        shutil.copyfile(source, target)
        with suppress(OSError):  # a disk that keeps no permissions
            shutil.copystat(source, target)
