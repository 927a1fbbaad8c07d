"""Ranks: join the group, sum small things over it, leave it. The only place that talks to torch.distributed directly.

There are two groups. DeepSpeed's moves gradients and parameters (NCCL on GPUs, gloo on CPUs); the control group, always
gloo and on the CPU, moves a few integers a step, so that agreeing on something never waits for the GPU.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_transformer.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among the others. `device` is where it computes."""

    rank: int
    num_ranks: int
    rank_of_node: int
    ranks_per_node: int
    device: torch.device
    control: dist.ProcessGroup
    timeout: timedelta

    @property
    def is_first(self) -> bool:
        """Rank 0 writes what is written once. Every rank decides: never return or raise under this condition."""
        return self.rank == 0

    def start_sum(self, values: torch.Tensor) -> dist.Work:
        """Begins summing `values` in place over the ranks (collective); `.wait()` on the result ends it."""
        work: dist.Work = dist.all_reduce(values, group=self.control, async_op=True)
        return work

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (on the CPU) summed over the ranks, in place (collective)."""
        dist.all_reduce(values, group=self.control)
        return values

    def barrier(self) -> None:
        """Waits for all ranks (collective); a rank that does not come within the timeout is an error."""
        self.sum(torch.zeros(1))

    def gather(self, value: Any) -> list[Any]:
        """One small Python value of every rank, on every rank (collective)."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank (collective)."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


def join(timeout_seconds: int) -> Ranks:
    """Joins the group named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; alone without them.

    Collectives that last longer than `timeout_seconds` end with an error on every rank (promise P7).
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank_of_node = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank_of_node) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and rank_of_node >= torch.cuda.device_count():
        raise UserError(
            f"rank {rank} is number {rank_of_node} on its node, which shows it {torch.cuda.device_count()} GPUs: start one "
            "rank per GPU, each seeing all GPUs of the node (Slurm: --gpus-per-node, not --gpus-per-task)"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", "1"))
    return Ranks(rank, num_ranks, rank_of_node, ranks_per_node, device, control, timeout)


def leave() -> None:
    """Leaves the group at a planned end; without it gloo aborts now and then. Never call it after an exception."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
