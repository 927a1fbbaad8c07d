"""Atomic writing of folders."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dist_transformer.files import flush_to_disk
from dist_transformer.run.outputs import check_output, never, writing


@contextmanager
def complete_folder(
    folder: Path, kind: str, is_own: Callable[[Path], bool] = never, own_files: Sequence[str] = ()
) -> Iterator[Path]:
    """Yields an empty folder next to `folder`, which at the end is renamed to it and replaces an older one.

    If the block raises, `folder` stays unchanged. Subfolders are not allowed.

    Args:
        kind, is_own: as for check_output, to recognise an older folder.
        own_files: files of an older folder that are replaced; others stay in it.

    Raises:
        UserError: the path holds something else or cannot be written.
        MachineError: the disk is full, or fails.
    """
    check_output(folder, kind, is_own)
    real = Path(os.path.realpath(folder))  # a link stays a link
    temporary = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(folder):
        try:
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


def _replace(folder: Path, temporary: Path, own_files: Sequence[str]) -> None:
    """Renames `temporary` to `folder` and moves everything but `own_files` from an older folder into it."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(temporary, folder)
        flush_to_disk(folder.parent)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    os.rename(folder, old)
    os.rename(temporary, folder)
    flush_to_disk(folder.parent)
    for path in old.iterdir():
        if path.name in own_files:
            path.unlink()
        else:
            os.rename(path, folder / path.name)
    old.rmdir()
