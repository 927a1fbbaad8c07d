"""Rollback of the run folder after a refused submission."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_transformer.cluster.slurm import PerhapsSubmitted
from dist_transformer.files import replacing


@contextmanager
def rolled_back_if_refused(files: Iterable[Path], snapshot: Path) -> Iterator[None]:
    """Restores `files` and `snapshot` after any error inside the context, unless there may be a job that needs them."""
    before = {path: path.read_bytes() if path.is_file() else None for path in files}
    aside = snapshot.with_name(f"{snapshot.name}.before")
    shutil.rmtree(aside, ignore_errors=True)
    if snapshot.is_dir():
        snapshot.rename(aside)
    try:
        yield
    except PerhapsSubmitted:
        raise
    except BaseException:
        shutil.rmtree(snapshot, ignore_errors=True)
        if aside.is_dir():
            aside.rename(snapshot)
        for path, old in before.items():
            if old is None:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.read_bytes() != old:
                with replacing(path) as temporary:
                    temporary.touch(0o600 if path.suffix == ".sbatch" else 0o666)
                    temporary.write_bytes(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
