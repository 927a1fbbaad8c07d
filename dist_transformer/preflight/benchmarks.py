"""One rank of a preflight: measures within a few seconds, alone, then with all others, and writes each result as soon as it is
known. What takes `Ranks` is collective; times are medians of a few repeats."""

import os
import platform
import re
import shutil
import signal
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dist_transformer import __version__
from dist_transformer.distributed.group import Ranks, device_of_rank, join, leave
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, UserError
from dist_transformer.files import write_json
from dist_transformer.preflight.outliers import DONE, REACHES_FIRST
from dist_transformer.preflight.report import rank_file
from dist_transformer.processes.stacks import host_name

REPEATS = 8
REPEAT_SECONDS = 0.25
"""Duration of a repeat, longer than the 0.1 s period of a CPU quota, so that each repeat is throttled."""
DISK_BYTES = 16 * 2**20
DISK_REPEATS = 4
LOW_SPACE_GB = 5.0
LATENCY_REPEATS = 20
BANDWIDTH_REPEATS = 3
CLOCK_REPEATS = 9
BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Bytes sent at once: enough for the full speed of a network, and not more than a slow one moves in a second."""


def limit_own_time(seconds: int) -> None:
    """Lets the kernel end this process after `seconds`, even in the middle of a call that never returns."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def measure(folder: Path, run_folder: Path, end: float) -> int:
    """Measures this rank, alone and then with the others (collective), and returns the exit code.

    Args:
        folder: where this rank's file is written.
        run_folder: a folder on the disk to be measured.
        end: deadline by the monotonic clock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = device_of_rank()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    record: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0")),
        "node": host_name(),
        "num_ranks": num_ranks,
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "measures": {
            "gpus": torch.cuda.device_count(),
            "gpus_expected": int(os.environ.get("SLURM_GPUS_ON_NODE") or 0),
            "cpus": len(os.sched_getaffinity(0)),
            **memory(device),
            "matmul_tflops": matmul_tflops(device),
        },
        "warnings": [],
        "together": "was not done with joining the others within the time limit" if num_ranks > 1 else DONE,
    }
    path = rank_file(folder, record["rank"])
    if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a node at once would disturb each other
        measures, record["warnings"] = disk(run_folder)
        record["measures"] |= measures
    write_json(path, record)
    return _measure_together(record, path, end) if num_ranks > 1 else EXIT_DONE


def _measure_together(record: dict[str, Any], path: Path, end: float) -> int:
    try:
        # A rank that waits must be able to write so before its time is over.
        ranks = join(max(1, int(0.8 * (end - time.monotonic()))))
        record["versions"][REACHES_FIRST] = "yes"
        by_node: dict[str, list[int]] = {}
        for rank, node in enumerate(ranks.all_gather_object(record["node"])):
            by_node.setdefault(node, []).append(rank)
        nodes = list(by_node.values())
        steps: dict[str, Callable[[], dict[str, float]]] = {
            "the all-reduce": lambda: all_reduce(ranks),
            "the exchange": lambda: exchange(ranks, nodes),
            "the clocks": lambda: clock(ranks),
        }
        for name, step in steps.items():
            record["together"] = f"was not done with {name} within the time limit"
            write_json(path, record)
            record["measures"] |= step()
        ranks.barrier()
    except (RuntimeError, UserError) as error:  # torch raises them when a rank does not join, or leaves
        text = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0][:300]
        if re.search(r"client socket has (timed out|failed)|failed to connect", text):
            record["versions"][REACHES_FIRST] = "no"
        record["together"] = f"{record['together']}: {text}"
        write_json(path, record)
        return EXIT_FAILED
    record["together"] = DONE
    write_json(path, record)
    with suppress(RuntimeError):  # everything is measured
        leave()
    return EXIT_DONE


def matmul_tflops(device: torch.device) -> float:
    """TFLOP/s as the median of several repeats; float32 on the CPU, else the 16-bit type that the GPU prefers."""
    size = 8192 if device.type == "cuda" else 512
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    _products_a_second(left, right, REPEAT_SECONDS)
    return median([_products_a_second(left, right, REPEAT_SECONDS) for _ in range(REPEATS)]) * 2 * size**3 / 1e12


def _products_a_second(left: torch.Tensor, right: torch.Tensor, seconds: float) -> float:
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            torch.mm(left, right)
        if left.is_cuda:
            torch.cuda.synchronize(left.device)
        products += 4
    return products / (time.perf_counter() - began)


def memory(device: torch.device) -> dict[str, float]:
    """Total and free memory of the machine and, on a GPU, of the GPU."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE))
    kinds = {"memory_total_gb": "MemTotal", "memory_free_gb": "MemAvailable"}
    found = {name: int(fields[kind]) * 1024 / 1e9 for name, kind in kinds.items()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"gpu_memory_free_gb": free / 1e9, "gpu_memory_total_gb": total / 1e9}
    return found


def _write_and_read(path: Path, content: bytes) -> tuple[float, float]:
    with path.open("wb+", buffering=0) as file:
        began = time.perf_counter()
        file.write(content)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise it is read from memory
        file.seek(0)
        asked = time.perf_counter()
        while file.read(2**20):
            pass
        read = time.perf_counter()
    megabytes = len(content) / 1e6
    return megabytes / (written - began), megabytes / (read - asked)


def disk(run_folder: Path) -> tuple[dict[str, float], list[str]]:
    """Speed and free space, and warnings. A disk that cannot be written has the speed 0.

    Speed: MB/s of writing a file until it is on the disk, and of reading it back. The best of a few: other nodes write
    to a shared disk at the same time, and now and then one of them waits for all others.
    """
    content, path = os.urandom(DISK_BYTES), run_folder / f".preflight.{host_name()}.{os.getpid()}.tmp"
    try:
        writes, reads = zip(*(_write_and_read(path, content) for _ in range(DISK_REPEATS)), strict=True)
    except OSError as error:
        return {"disk_write_mb_per_second": 0.0}, [f"{run_folder} cannot be written: {error}"]
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    places = {"run_disk_free_gb": str(run_folder), "temporary_disk_free_gb": tempfile.gettempdir()}
    free = {name: shutil.disk_usage(place).free / 1e9 for name, place in places.items()}
    low = [f"{free[name]:.1f} GB are free in {place}" for name, place in places.items() if free[name] < LOW_SPACE_GB]
    return {"disk_write_mb_per_second": max(writes), "disk_read_mb_per_second": max(reads), **free}, low


def versions() -> dict[str, str]:
    """Versions of everything that must be the same on all nodes."""
    found = {"dist_transformer": __version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "deepspeed": version("deepspeed")}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (match := re.search(r"\s(\d+\.\d+[\d.]*)\s", driver.read_text(encoding="utf-8"))):
        found["nvidia driver"] = match[1]
    return found


def all_reduce(ranks: Ranks) -> dict[str, float]:
    """Latency of the smallest sum over all ranks, and bandwidth of a large one: 2 (n - 1) / n x bytes / time, which does
    not depend on the number of ranks n where the network is the limit.
    """
    small = torch.zeros(1, device=ranks.device)
    large = torch.zeros(BYTES[ranks.device.type] // 4, device=ranks.device)
    latency = _median_seconds(lambda: ranks.sum_on_device(small), LATENCY_REPEATS)
    seconds = _median_seconds(lambda: ranks.sum_on_device(large), BANDWIDTH_REPEATS)
    moved = 2 * (ranks.num_ranks - 1) / ranks.num_ranks * large.nbytes
    return {"all_reduce_latency_seconds": latency, "all_reduce_gb_per_second": moved / seconds / 1e9}


def exchange(ranks: Ranks, nodes: Sequence[Sequence[int]]) -> dict[str, float]:
    """The better of the bandwidths to the two neighbouring nodes, so that a good node next to a bad one is not blamed.

    `nodes`: the ranks of each node. The i-th rank of a node exchanges with the i-th of its neighbours.
    """
    values = torch.zeros(BYTES[ranks.device.type] // 4, device=ranks.device)
    best = 0.0
    for pairs in ring_rounds(len(nodes)):
        ranks.barrier()
        for other in partners(ranks.rank, [(nodes[a], nodes[b]) for a, b in pairs]):
            seconds = _median_seconds(partial(ranks.exchange, other, values), BANDWIDTH_REPEATS)
            best = max(best, values.nbytes / seconds / 1e9)
    return {"exchange_gb_per_second": best} if best else {}


def ring_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Neighbours on a ring, in rounds in which each node has one partner: [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]."""
    if num_nodes < 3:
        return [[(0, 1)]] if num_nodes == 2 else []
    edges = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    if num_nodes % 2 == 0:
        return [edges[0::2], edges[1::2]]
    return [edges[0:-1:2], edges[1:-1:2], edges[-1:]]


def partners(rank: int, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Ranks with which `rank` exchanges in a round: one, or none if the nodes have different numbers of ranks."""
    both = [pair for left, right in pairs for pair in zip(left, right, strict=False)]
    return [b if rank == a else a for a, b in both if rank in (a, b)]


def clock(ranks: Ranks) -> dict[str, float]:
    """Seconds by which this rank's clock is ahead of rank 0's, read after a barrier: exact to the time of a collective."""
    found = []
    for _ in range(CLOCK_REPEATS):
        ranks.barrier()
        now = time.time()
        found.append(now - ranks.all_gather_object(now)[0])
    return {"clock_offset_seconds": median(found)}


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()  # the first call makes the connections
    return median(timeit.repeat(work, number=1, repeat=repeats))
