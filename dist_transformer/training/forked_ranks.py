"""Ranks of this machine for `train --ranks`: the modules of training are imported once, then each rank is forked.

Forking is safe only if the parent process has a single thread and has not begun to use a GPU. If this is not known,
each rank is a program of its own with its own imports, and two ranks take 1.4 times as long to their first step.
"""

import os
from collections.abc import Callable
from functools import partial

from dist_transformer.errors import EXIT_DONE
from dist_transformer.processes import launching
from dist_transformer.processes.children import Signals

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of NVIDIA, AMD and Windows' Linux. Asking torch for a GPU may already begin to use it."""


def run_local_ranks(
    prepare: Callable[[], object], train: Callable[[], object], arguments: list[str], num_ranks: int, signals: Signals
) -> int:
    """Prepares the corpus in a process of its own, then trains on `num_ranks` ranks. Returns the exit code.

    To be called before any thread is started.

    Args:
        prepare, train: functions of those processes, forked from this one; they set up their stop signals themselves.
        arguments: command line of `train`, for ranks that are not forked.
    """
    has_no_gpu = not any(map(os.path.exists, GPU_DEVICES))
    meanwhile = partial(_import_training, num_ranks) if has_no_gpu else lambda: None
    code = launching.fork_and_wait(prepare, meanwhile, signals)
    if code != EXIT_DONE:
        return code
    if has_no_gpu and launching.may_fork():
        import torch

        if not torch.cuda.is_available():
            return launching.fork_local_ranks(train, num_ranks, signals=signals)
    return launching.start_local_ranks(arguments, num_ranks, signals=signals, are_held=True, leave_together=True)


def _import_training(num_ranks: int) -> None:
    """Imports the slowest modules of a rank that start no thread (pyarrow does)."""
    os.environ.setdefault("OMP_NUM_THREADS", str(launching.threads_per_rank(num_ranks)))  # torch reads it at import
    given = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy starts threads at import, which training does not use
    with launching.importing():
        import dist_transformer.training.engine.engine  # noqa: F401

    del os.environ["OPENBLAS_NUM_THREADS"]
    if given is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = given
