"""Ranks: join the group, sum small things over it, leave it. The only place that talks to torch.distributed directly.

There are two groups. DeepSpeed's moves gradients and parameters (NCCL on GPUs, gloo on CPUs); the control group, always
gloo and on the CPU, moves a few integers a step, so that agreeing on something never waits for the GPU.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_transformer.errors import UserError


@dataclass
class LastCollective:
    """The newest collective of this rank, for the message of one that hangs.

    Attributes:
        number: how many this rank has begun: the same on ranks that stand at the same place.
        began, ended: by the monotonic clock; ended is None while it lasts, or when nobody says that it has ended.
    """

    name: str = ""
    number: int = 0
    began: float = 0.0
    ended: float | None = None
    is_followed: bool = False
    """Its end is noted too."""

    def begin(self, name: str, is_followed: bool) -> None:
        self.name, self.number, self.is_followed = name, self.number + 1, is_followed
        self.began, self.ended = time.monotonic(), None

    def text(self) -> str:
        """ "in collective 12 (gather) for 61 s", or "last collective: 12 (gather), ended 61 s ago"."""
        now = time.monotonic()
        if self.number == 0:
            return "no collective yet"
        if self.ended is not None:
            return f"last collective: {self.number} ({self.name}), ended {now - self.ended:.0f} s ago"
        if self.is_followed:
            return f"in collective {self.number} ({self.name}) for {now - self.began:.0f} s"
        return f"last collective: {self.number} ({self.name}), begun {now - self.began:.0f} s ago"


@dataclass(frozen=True)
class Ranks:
    """This process among the others. `device` is where it computes, `last` the newest collective, noted as it begins."""

    rank: int
    num_ranks: int
    rank_of_node: int
    ranks_per_node: int
    device: torch.device
    control: dist.ProcessGroup
    timeout: timedelta
    last: LastCollective = field(default_factory=LastCollective, compare=False)

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0 writes what is written once. Every rank decides: never return or raise under this condition."""
        return self.rank == 0

    def note_collective(self, name: str) -> None:
        """For collectives that are not made here: says that one begins. Its end is not known."""
        self.last.begin(name, is_followed=False)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Says that a collective begins, and that it has ended. After an exception it counts as not ended."""
        self.last.begin(name, is_followed=True)
        yield
        self.last.ended = time.monotonic()

    def start_sum(self, values: torch.Tensor) -> "PendingSum":
        """Begins summing `values` in place over the ranks (collective); `.wait()` on the result ends it."""
        name = f"sum of {_size(values)}, begun ahead"
        with self.collective(name):
            return PendingSum(dist.all_reduce(values, group=self.control, async_op=True), self, name)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (on the CPU) summed over the ranks, in place (collective)."""
        with self.collective(f"sum of {_size(values)}"):
            dist.all_reduce(values, group=self.control)
        return values

    def barrier(self) -> None:
        """Waits for all ranks (collective); a rank that does not come within the timeout is an error."""
        self.all_reduce_sum(torch.zeros(1))

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small Python value of every rank, on every rank (collective)."""
        values: list[Any] = [None] * self.num_ranks
        with self.collective("gather"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank (collective)."""
        values = [value]
        with self.collective("broadcast_object"):
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def sum_on_device(self, values: torch.Tensor) -> None:
        """`values` (on the device) summed over the ranks, in place and to its end, as gradients are (collective)."""
        with self.collective(f"sum of {_size(values)} on the device"):
            dist.all_reduce(values)
            self._finish()

    def exchange(self, other: int, values: torch.Tensor) -> torch.Tensor:
        """Sends `values` (on the device) to the rank `other`, which sends its own of the same size, returned here."""
        received = torch.empty_like(values)
        both = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, received, other)]
        with self.collective(f"exchange of {_size(values)} with rank {other}"):
            for work in dist.batch_isend_irecv(both):
                work.wait()
            self._finish()
        return received

    def send(self, other: int, values: torch.Tensor) -> None:
        """`values` (on the CPU) to the rank `other`, which calls `receive`."""
        with self.collective(f"send to rank {other}"):
            dist.send(values, other, group=self.control)

    def receive(self, other: int, values: torch.Tensor) -> None:
        """What the rank `other` sends, into `values` (on the CPU)."""
        with self.collective(f"receive from rank {other}"):
            dist.recv(values, other, group=self.control)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class PendingSum:
    """A sum that was begun."""

    work: dist.Work
    ranks: Ranks
    name: str

    def wait(self) -> None:
        """Waits until the values are summed (collective)."""
        with self.ranks.collective(f"waiting for the {self.name}"):
            self.work.wait()


def join(timeout_seconds: int) -> Ranks:
    """Joins the group named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; alone without them.

    Collectives that last longer than `timeout_seconds` end with an error on every rank (promise P7).
    """
    _let_segments_grow()
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


def _let_segments_grow() -> None:
    """Memory of GPUs in segments that grow: batches of ever other shapes otherwise cut it into pieces that none fits into.

    torch reads it when it first asks a GPU for memory; what a person has set stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's before 2.9, and warned of since
    if not any(name in os.environ for name in names):
        os.environ[names[torch.__version__ < "2.9"]] = "expandable_segments:True"


@contextmanager
def around_waits(entered: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """As long as the block lasts, this process waits for collectives inside of `entered()`: that a profile sees them."""
    wait = dist.Work.wait

    def waiting(work: dist.Work, *arguments: Any, **named: Any) -> bool:
        with entered():
            return bool(wait(work, *arguments, **named))

    dist.Work.wait = waiting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


_CAUSES = (
    (
        r"Timed out waiting \d+ms for|Watchdog caught collective operation timeout|Application timeout caused pair closure",
        "a rank did not come to a collective within training.hang_seconds: look for one that hangs, or is far slower",
    ),
    (
        r"Connection (closed by peer|reset by peer)|Broken pipe|Read error|remote process exited|NCCL communicator was aborted",
        "another rank has left in the middle of a collective: look for the first rank that failed",
    ),
    (
        r"waiting for clients|wait timeout after|client socket has (timed out|failed)",
        "not all ranks came together within training.hang_seconds: is each started, and does each reach MASTER_ADDR?",
    ),
)
"""What gloo, NCCL and torch's store say, and what it means."""


def explain(error: BaseException) -> str | None:
    """One line on the cause of a failed collective; None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, str(error))), None)


def leave() -> None:
    """Leaves the group at a planned end; without it gloo aborts now and then. Never call it after an exception."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _size(values: torch.Tensor) -> str:
    return f"{values.numel():,} {str(values.dtype).removeprefix('torch.')}"


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
