"""The ranks of this machine for `train --ranks`: what training imports is imported once, and each rank forked from there.

A forked process is whole only if the one it comes from has a single thread and has not begun to use a GPU. Where one of
the two cannot be told, each rank is a program of its own, and imports for itself.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from dist_transformer.errors import EXIT_DONE
from dist_transformer.processes.children import Signals
from dist_transformer.processes.launching import (
    fork_and_wait,
    fork_local_ranks,
    may_fork,
    start_local_ranks,
    threads_per_rank,
)

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA, AMD and Windows' Linux. To ask torch for a GPU can be the beginning of its use."""


def run_local_ranks(
    prepare: Callable[[], object], train: Callable[[], object], arguments: list[str], num_ranks: int, signals: Signals
) -> int:
    """Prepares the corpus in a process of its own, then trains on `num_ranks` ranks; the exit code.

    Call it before anything has started a thread.

    Args:
        prepare, train: what those processes do, forked from this one; they ask for their stop signals themselves.
        arguments: of `train`, for ranks that are no forks.
    """
    has_no_gpu = not any(map(os.path.exists, GPU_DEVICES))
    meanwhile = partial(_import_training, num_ranks) if has_no_gpu else lambda: None
    code = fork_and_wait(prepare, meanwhile, signals)
    if code != EXIT_DONE:
        return code
    if has_no_gpu and may_fork() and not _has_gpu():
        return fork_local_ranks(train, num_ranks, signals=signals)
    return start_local_ranks(arguments, num_ranks, signals=signals, are_held=True, leave_together=True)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports within it are not interrupted to look for garbage, of which they make next to none, nor looked at later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_training(num_ranks: int) -> None:
    """What takes longest of what a rank imports, and starts no thread, as pyarrow does."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))  # is read when torch is loaded
    given = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = (
        "1"  # else numpy starts threads when it is loaded; training has no use for them
    )
    with quick_imports():
        import dist_transformer.training.engine.engine  # noqa: F401
    if given is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = given


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
