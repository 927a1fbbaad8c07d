"""Ranks: join the group, sum small tensors over it, leave it. Only it and DeepSpeed's adapter call torch.distributed.

There are two groups. DeepSpeed's moves gradients and parameters (NCCL on GPUs, gloo on CPUs); the control group, always
gloo and on the CPU, moves a few integers a step, so that the ranks never wait for the GPU to agree on something.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from dist_transformer.distributed.causes import exit_code_of, explain
from dist_transformer.errors import MachineError, UserError
from dist_transformer.processes.launching import free_port

Result = TypeVar("Result")


@dataclass
class LastCollective:
    """The newest collective of this rank, for the error message of a rank that hangs.

    Attributes:
        number: number of collectives begun by this rank: the same on ranks that are at the same point of the program.
        began, ended: by the monotonic clock; ended is None while it lasts, or when its end is not recorded.
    """

    name: str = ""
    number: int = 0
    began: float = 0.0
    ended: float | None = None
    is_followed: bool = False
    """True if the end of the collective is recorded too."""

    def begin(self, name: str, is_followed: bool) -> None:
        self.name, self.number, self.is_followed = name, self.number + 1, is_followed
        self.began, self.ended = time.monotonic(), None

    def text(self) -> str:
        """Returns "in collective 12 (gather) for 61 s", or "last collective: 12 (gather), ended 61 s ago"."""
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
    """Position of this process in the group. `device` is where it computes, `last` its newest collective."""

    rank: int
    num_ranks: int
    rank_of_node: int
    ranks_per_node: int
    device: torch.device
    control: dist.ProcessGroup
    last: LastCollective = field(default_factory=LastCollective, compare=False)

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, the only one that writes. Every rank decides: never return or raise under this condition."""
        return self.rank == 0

    def note_collective(self, name: str) -> None:
        """Records the start of a collective that is called outside of this file. Its end is not recorded."""
        self.last.begin(name, is_followed=False)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Records the start and the end of a collective. After an exception it counts as not ended."""
        self.last.begin(name, is_followed=True)
        yield
        self.last.ended = time.monotonic()

    def start_sum(self, values: torch.Tensor) -> "Pending":
        """Begins summing `values` (on the CPU) in place over the ranks (collective); `.wait()` returns them."""
        what = f"sum of {_size(values)}, begun ahead"
        with self.collective(what):
            work = dist.all_reduce(values, group=self.control, async_op=True)
        return Pending(work, self, what, lambda: values, values)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` (on the CPU) over the ranks, in place (collective)."""
        with self.collective(f"sum of {_size(values)}"):
            dist.all_reduce(values, group=self.control)
        return values

    def barrier(self) -> None:
        """Waits for all ranks (collective); a rank that does not arrive within the timeout is an error."""
        self.all_reduce_sum(torch.zeros(1))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns one small Python value of every rank, on every rank (collective)."""
        values: list[Any] = [None] * self.num_ranks
        with self.collective("gather"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def from_rank_zero(self, make: Callable[[], Result]) -> Result:
        """Returns what `make` returns on rank 0, which alone calls it, on every rank (collective)."""
        values: list[Any] = [make() if self.is_rank_zero else None]
        with self.collective("broadcast_object"):
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]  # type: ignore[no-any-return]

    def sum_on_device(self, values: torch.Tensor) -> None:
        """Sums `values` (on the device) over the ranks, in place, as gradients are, and waits for it (collective)."""
        with self.collective(f"sum of {_size(values)} on the device"):
            dist.all_reduce(values)
            self._finish()

    def total_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks of one number that each has on its device, without waiting for it (collective)."""
        with self.collective("sum of a number on the device"):
            if self.num_ranks > 1:
                dist.all_reduce(value)
            return value

    def start_mean(self, values: torch.Tensor, into_shares: bool, is_sum: bool = False) -> "Pending":
        """Begins averaging `values` (on the device) over the ranks (collective); `.wait()` returns the mean, in fp32, or
        with `is_sum` the sum, in the type of `values`.

        `into_shares`: each rank gets only its own of as many equal parts as there are ranks. On gloo, which has no such
        collective, every rank sends the parts to their owners, who add them in fp32.
        """
        what = f"mean of {_size(values)}{' in shares' if into_shares else ''}, begun ahead"
        with self.collective(what):
            work, finish = self._begin_mean(values, into_shares, is_sum)
        return Pending(work, self, what, finish, values)

    def _begin_mean(
        self, values: torch.Tensor, into_shares: bool, is_sum: bool
    ) -> tuple[dist.Work | None, Callable[[], torch.Tensor]]:
        count, on_cpu = self.num_ranks, self.device.type == "cpu"
        if count == 1:
            return None, (lambda: values) if is_sum else values.float
        if into_shares and on_cpu:
            parts = torch.empty_like(values)
            work = dist.all_to_all_single(parts, values, async_op=True)
            of_parts = parts.view(count, -1)
            return work, partial(of_parts.sum, 0) if is_sum else partial(of_parts.mean, 0, dtype=torch.float32)
        operation = dist.ReduceOp.SUM if is_sum or on_cpu else dist.ReduceOp.AVG
        if into_shares:
            result = values.new_empty(values.numel() // count)
            work = dist.reduce_scatter_tensor(result, values, op=operation, async_op=True)
        else:
            result, work = values, dist.all_reduce(values, op=operation, async_op=True)
        if is_sum:
            return work, lambda: result
        return work, (lambda: result.float().div_(count)) if on_cpu else result.float

    def start_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> "Pending":
        """Begins filling `whole` (on the device) with the parts `mine` of all ranks in turn (collective); `mine` may be
        a view of it. `.wait()` returns it."""
        what, work = f"gather of {_size(whole)}, begun ahead", None
        with self.collective(what):
            if self.num_ranks > 1:
                work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        return Pending(work, self, what, lambda: whole, mine)

    def exchange(self, other: int, values: torch.Tensor) -> torch.Tensor:
        """Sends `values` (on the device) to the rank `other`, and returns those of the same size that it sends back."""
        received = torch.empty_like(values)
        both = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, received, other)]
        with self.collective(f"exchange of {_size(values)} with rank {other}"):
            for work in dist.batch_isend_irecv(both):
                work.wait()
            self._finish()
        return received

    def pass_on(self, value: Any) -> Any:
        """Sends a Python value to the rank before this one, and returns that of the rank behind it (collective)."""
        before, behind = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        values = [value]
        with self.collective("pass_on"):
            # Rank 1 receives first: nobody waits in a circle.
            for is_sending in (self.rank % 2 == 0, self.rank % 2 == 1):
                if is_sending and self.num_ranks > 1:
                    dist.send_object_list([value], before, group=self.control)
                elif self.num_ranks > 1:
                    dist.recv_object_list(values, behind, group=self.control)
        return values[0]

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Pending:
    """A collective that was begun.

    Attributes:
        work: None if there is nothing to wait for.
        finish: computes the result when the collective has ended.
        sent: kept until then.
    """

    work: dist.Work | None
    ranks: Ranks
    what: str
    finish: Callable[[], torch.Tensor]
    sent: torch.Tensor

    @property
    def is_done(self) -> bool:
        """True if there is nothing to wait for any more."""
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> torch.Tensor:
        """Waits for the result (collective); on a GPU only what it computes next waits, not the host."""
        if self.work is not None:
            with self.ranks.collective(f"waiting for the {self.what}"):
                self.work.wait()
        return self.finish()


class Fetched:
    """A number on its way from the device to the host; reading it waits for work queued before, of other ranks too."""

    def __init__(self, number: torch.Tensor, ranks: Ranks) -> None:
        self._ranks, self._number = ranks, number.to("cpu", non_blocking=True)  # into page-locked memory
        self._arrival = torch.cuda.Event() if number.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrival is not None:
            self._arrival.record()

    def value(self) -> float:
        with self._ranks.collective("waiting for the device"):
            if self._arrival is not None:
                self._arrival.synchronize()
            return float(self._number)


def join(timeout_seconds: int) -> Ranks:
    """Joins the group named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a group of one without them.

    Collectives that last longer than `timeout_seconds` end with an error on every rank.
    """
    _let_segments_grow()
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank_of_node = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank_of_node) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and rank_of_node >= torch.cuda.device_count():
        raise UserError(
            f"rank {rank} is number {rank_of_node} on its node, which shows it {torch.cuda.device_count()} GPUs: start one "
            "rank per GPU, each seeing all GPUs of the node (Slurm: --gpus-per-node, not --gpus-per-task; MIG: one slice)"
        )
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:
            told = f"{platform.node()}: GPU {rank_of_node} cannot be used ({str(error).splitlines()[0]})"
            raise MachineError(f"{told}: another process holds it, or it is broken (nvidia-smi)") from error
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        if (cause := explain(error)) is None:
            raise
        refusal = MachineError(f"rank {rank} of {num_ranks} on {platform.node()} cannot join the others: {cause}")
        refusal.exit_code = exit_code_of(cause)
        raise refusal from error
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", "1"))
    return Ranks(rank, num_ranks, rank_of_node, ranks_per_node, device, control)


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
    is_one = seen == 1 and not any(t and "," in t and "MIG-" not in t for t in lists)
    if seen < needed and not is_one and (torch.version.cuda or torch.version.hip):
        raise MachineError(
            f"{os.uname().nodename}: Slurm gave this job {given} GPUs here, torch {torch.__version__} sees {seen}: the driver is "
            "too old, a GPU is lost (nvidia-smi), or the container lacks --nv (enroot: NVIDIA_VISIBLE_DEVICES). "
            "To train on CPUs set slurm.gpus_per_node: 0, or CUDA_VISIBLE_DEVICES= for the ranks"
        )
    return seen > 0


def device_of_rank() -> torch.device:
    """The GPU with the number of this rank on its node, or the CPU. Ranks beyond the GPUs of a node share them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _let_segments_grow() -> None:
    """Makes torch allocate GPU memory in expandable segments: batches of changing shapes otherwise fragment it. torch
    reads the variable at its first allocation on a GPU; a value set by the user stays."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's before 2.9, deprecated since
    if not any(name in os.environ for name in names):
        os.environ[names[torch.__version__ < "2.9"]] = "expandable_segments:True"


@contextmanager
def around_waits(entered: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Makes this process wait for collectives inside of `entered()` while the block lasts: a profile then has them."""
    wait = dist.Work.wait

    def waiting(work: dist.Work, *arguments: Any, **named: Any) -> bool:
        with entered():
            return bool(wait(work, *arguments, **named))

    with patch.object(dist.Work, "wait", waiting):
        yield


def leave() -> None:
    """Leaves the group at a planned end, without which gloo aborts now and then. Never call it after an exception."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _size(values: torch.Tensor) -> str:
    return f"{values.numel():,} {str(values.dtype).removeprefix('torch.')}"
