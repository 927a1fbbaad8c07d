"""A folder that is there whole or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dist_transformer.files import flush_to_disk
from dist_transformer.run.outputs import check_output, never, writing


@contextmanager
def whole_folder(
    folder: Path, kind: str, is_own: Callable[[Path], bool] = never, own_files: Sequence[str] = ()
) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, which in the end takes its place, and that of an older one, by a rename.

    Where the block raises, `folder` stays as it was. The files may lie in it directly only.

    Args:
        kind, is_own: of check_output, which says what an older one is.
        own_files: those of an older one that are replaced; others stay in it.

    Raises:
        UserError: something else is there, or nothing can be written at this path.
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
    """Renames `temporary` to `folder`; of an older folder everything but `own_files` is moved into it."""
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
