"""The device of a rank."""

import os

import torch

from dist_transformer.errors import MachineError


def has_gpus() -> bool:
    """Returns whether torch finds GPUs. MachineError: fewer than Slurm gave and the ranks of this node need, although no list
    of visible ones hides them, and torch is not built for CPUs alone."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    lists = [os.environ.get(f"{of}_VISIBLE_DEVICES") for of in ("CUDA", "HIP", "ROCR")]
    # "", "-1" and "NoDevFiles" hide all.
    listed = [t.count(",") + 1 if t.startswith((*"0123456789", "GPU-", "MIG-")) else 0 for t in lists if t is not None]
    needed = min(given, int(os.environ.get("LOCAL_WORLD_SIZE") or 1), *listed)
    # One of several is no fault: a task that Slurm bound to its own GPU sees no other, nor two slices of one (MIG).
    if seen < needed and seen != 1 and (torch.version.cuda or torch.version.hip):
        raise MachineError(
            f"{os.uname().nodename}: Slurm gave this job {given} GPUs here, torch {torch.__version__} sees {seen}: the driver is "
            "too old, a GPU is lost (nvidia-smi), or the container lacks --nv. To train on CPUs set slurm.gpus_per_node: 0, or "
            "CUDA_VISIBLE_DEVICES= for the ranks"
        )
    return seen > 0


def device_of_rank() -> torch.device:
    """The GPU with the number of this rank on its node, or the CPU. Ranks beyond the GPUs of a node share them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
