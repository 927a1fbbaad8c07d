"""A folder that is there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_transformer.errors import UserError
from dist_transformer.run_dir import flush_to_disk, writing


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, which in the end takes its place, and that of an older one, by a rename.

    Where the block raises, `folder` stays as it was. The files may lie in it directly only.

    Raises:
        UserError: nothing can be written at this path.
        MachineError: the disk is full, or fails.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            for path in temporary.iterdir():
                flush_to_disk(path)
            flush_to_disk(temporary)
            _replace(folder, temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def refuse_to_overwrite(folder: Path) -> None:
    """UserError when there is anything at this path but an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already, expected a new path to write to; remove it or give another")


def _replace(folder: Path, temporary: Path) -> None:
    """Renames `temporary` to `folder`; an older folder is renamed away before and deleted after."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
