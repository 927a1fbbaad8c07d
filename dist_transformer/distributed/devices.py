"""The device of a rank."""

import os

import torch


def device_of_rank() -> torch.device:
    """The GPU with the number of this rank on its node, or the CPU. Ranks beyond the GPUs of a node share them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
