"""Rollback of the run folder after a refused submission."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_transformer.cluster.slurm import PerhapsSubmitted
from dist_transformer.files import replacing


@contextmanager
def rolled_back_if_refused(files: Sequence[Path], snapshot: Path) -> Iterator[None]:
    """Restores `files` and `snapshot` after any error inside the context, unless there may be a job that needs them."""
    # Renamed, not read, and where they are: of a colleague who submitted the run before, they can be neither read nor moved.
    ours = [path for path in (snapshot, *files) if path.parent == snapshot.parent and path.exists()]
    aside = {path: path.with_name(f"{path.name}.{os.getpid()}.before") for path in ours}
    before = {path: path.read_bytes() if path.is_file() and path not in aside else None for path in files}
    for path, other in aside.items():
        path.rename(other)
    try:
        yield
    except PerhapsSubmitted:
        raise
    except BaseException:
        shutil.rmtree(snapshot, ignore_errors=True)
        for path, old in before.items():
            if old is None:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.read_bytes() != old:
                with replacing(path) as temporary:
                    temporary.write_bytes(old)
        for path, other in aside.items():
            other.rename(path)
        raise
    for other in snapshot.parent.glob("*.before"):
        with suppress(OSError):
            shutil.rmtree(other) if other.is_dir() else other.unlink()
