"""Memory of this rank: the available amount, the peak, and the message when it is out of memory.

On a GPU the allocator counts. On a CPU the peak is that of the whole process as counted by the kernel, and a rank may
use the least of three: the machine's available memory, the limit of the job's cgroup (Slurm's --mem), `ulimit -v`.
"""

import gc
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import MachineError, UserError
from dist_transformer.planning.memory import USABLE_SHARE

CPU_SHARE = 0.8
"""Usable share of a machine's memory; the rest is for loader processes, files and other programs."""
RESERVED_ADDRESS_BYTES = 1_500_000_000
"""Addresses that readers of the corpus and threads reserve later: `ulimit -v` counts addresses, not memory."""
CGROUPS = Path("/sys/fs/cgroup")

_TRIED = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(
    "out of memory|_STATUS_ALLOC_FAILED|failed to CUDA (host )?[cm]?alloc|can(no|')t allocate memory|bad_alloc"
    "|could not (create a (primitive(?! desc)|memory object)|execute a primitive)",
    re.IGNORECASE,
)
"""Messages of torch for CPUs, and of oneDNN, CUDA, cuBLAS, cuDNN and NCCL, which do not use torch's allocator."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ADVICE = (
    "Lower data.max_tokens (auto finds the largest that fits), or set training.activation_checkpointing=true, a higher "
    "training.zero_stage, training.offload=optimizer, or training.precision=bf16 or fp16"
)


@dataclass(frozen=True)
class Allowance:
    """Memory that this rank may still use, and the name of the limit."""

    bytes: int
    limited_by: str


def allowance(ranks: Ranks) -> Allowance:
    """Returns the memory that this rank may use in addition to that of its process; ranks share a machine's memory."""
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        return Allowance(int(USABLE_SHARE * (free + torch.cuda.memory_reserved(ranks.device))), "the GPU's memory")
    shared = [Allowance(left.bytes // ranks.ranks_per_node, left.limited_by) for left in _left_to_all()]
    own = [Allowance(left.bytes - RESERVED_ADDRESS_BYTES, left.limited_by) for left in _left_to_process()]
    least = min([*shared, *own], key=lambda left: left.bytes)
    return Allowance(int(CPU_SHARE * max(0, least.bytes)), least.limited_by)


def _left_to_all() -> list[Allowance]:
    machine = Allowance(psutil.virtual_memory().available, "the machine's memory")
    with suppress(OSError):
        return [machine, *cgroup_allowances(CGROUPS, Path("/proc/self/cgroup").read_text(encoding="utf-8"))]
    return [machine]


def _left_to_process() -> list[Allowance]:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = max(0, most - psutil.Process().memory_info().vms)
    return [] if most == resource.RLIM_INFINITY else [Allowance(left, "ulimit -v")]


def cgroup_allowances(cgroups: Path, membership: str) -> list[Allowance]:
    """Returns the memory left in each limited cgroup of a process or its parents, file cache counted as free.

    `membership`: the text of /proc/self/cgroup, lines of `number:controllers:path`. Inside a container the path may be
    that of the host: then only the parents are found.
    """
    allowances = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, version = (cgroups / "memory", _VERSION_1) if controllers else (cgroups, _VERSION_2)
        here = root / path.lstrip("/")
        for folder in (here, *(parent for parent in here.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # `max`, meaning no limit, is no number
                limit, used = (int((folder / name).read_text()) for name in version[:2])
                cache = re.search(rf"^{version[2]} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                left = limit - used + (int(cache[1]) if cache else 0)
                allowances.append(Allowance(left, "the memory limit of the job (cgroup)"))
    return allowances


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def begin_peak(device: torch.device) -> int:
    """Resets the count of `peak`, and returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # not permitted by the kernel: the peak is that since the process began
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return int(psutil.Process().memory_info().rss)


def peak(device: torch.device) -> int:
    """Returns the maximum of bytes in use since `begin_peak`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back(device: torch.device) -> None:
    """Releases unused memory to the system, and resets the count of peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def explaining_out_of_memory(doing: str, device: torch.device, kind: type[UserError] = UserError) -> Iterator[None]:
    """Converts an out-of-memory error in the block to one of `kind` with the requested amount and advice; to a MachineError,
    for which `is_out_of_memory` is not true, where other processes hold much of the GPU."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise kind(f"out of memory in {doing}: {_wanted(error)}{_in_use(device, doing)}. {_ADVICE}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error of any library, or of another rank."""
    has_text = isinstance(error, RuntimeError | MachineError) and _OUT_OF_MEMORY.search(str(error)) is not None
    has_text &= "ibv_" not in str(error)  # a network card's, which lacks memory that it may lock
    return has_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def as_text(count: float) -> str:
    """Formats bytes for people, in powers of ten: 1.2 GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _wanted(error: BaseException) -> str:
    found = _TRIED.search(str(error))
    return f"{as_text(float(found[1]) * _UNITS[found[2]])} more were asked for; " if found else ""


def _in_use(device: torch.device, doing: str) -> str:
    if device.type == "cuda":
        in_use = f"{as_text(torch.cuda.memory_allocated(device))} are in use by this rank"
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError as error:  # the query itself may need memory
            return f"{in_use}; how much is free, the GPU does not say: {str(error).splitlines()[0]}"
        others = total - free - torch.cuda.memory_reserved(device)
        if others > 0.1 * total + 1e9:  # more than CUDA and NCCL take for this process
            held = f"other processes hold {as_text(others)} of the GPU's {as_text(total)} (nvidia-smi)"
            raise MachineError(f"no memory left in {doing}: {in_use}, {held}: end them, or start on another GPU")
        return f"{in_use}, {as_text(free)} of the GPU's {as_text(total)} are free"
    least = min([*_left_to_all(), *_left_to_process()], key=lambda left: left.bytes)
    used = int(psutil.Process().memory_info().rss)
    return f"{as_text(used)} are in use by this rank, {as_text(least.bytes)} are left ({least.limited_by})"
