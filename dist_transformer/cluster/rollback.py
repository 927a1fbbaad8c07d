"""Rollback of the run folder after a refused submission."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dist_transformer.cluster.slurm import PerhapsSubmitted
from dist_transformer.files import replacing


@contextmanager
def rolled_back_if_refused(files: Sequence[Path], snapshot: Path) -> Iterator[None]:
    """Restores `files` and `snapshot` after any error inside the context, unless there may be a job that needs them."""
    aside = snapshot.with_name("before")
    shutil.rmtree(aside, ignore_errors=True)
    # Scripts are not read: a colleague who submitted the run before may be the only one who may.
    moved = [path for path in (snapshot, *files) if path.parent == snapshot.parent and path.exists()]
    before = {path: path.read_bytes() if path.is_file() and path not in moved else None for path in files}
    aside.mkdir()
    for path in moved:
        path.rename(aside / path.name)
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
        for path in moved:
            (aside / path.name).rename(path)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
