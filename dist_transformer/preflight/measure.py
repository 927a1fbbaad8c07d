"""One rank of a preflight: measures, and writes each result as soon as it is known."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dist_transformer.distributed.group import device_of_rank, join, leave
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, UserError
from dist_transformer.files import write_json
from dist_transformer.preflight import benchmarks
from dist_transformer.preflight.outliers import DONE, REACHES_FIRST
from dist_transformer.preflight.report import rank_file
from dist_transformer.processes.stacks import host_name


@dataclass
class RankRecord:
    """Content of a rank's file; `together` is "done", or names the step that was not completed."""

    rank: int
    node: str
    num_ranks: int
    ranks_per_node: int
    device: str
    measures: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    together: str = "was not done with joining the others within the time limit"


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
    record = RankRecord(
        rank=int(os.environ.get("RANK", "0")),
        node=host_name(),
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    )
    path = rank_file(folder, record.rank)
    record.versions = benchmarks.versions()
    record.measures |= {
        **benchmarks.counts(),
        **benchmarks.memory(device),
        "matmul_tflops": benchmarks.matmul_tflops(device),
    }
    if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a node at once would disturb each other
        measures, warnings = benchmarks.disk(run_folder)
        record.measures |= measures
        record.warnings += warnings
    record.together = record.together if record.num_ranks > 1 else DONE
    write_json(path, vars(record))
    return _measure_together(record, path, end) if record.num_ranks > 1 else EXIT_DONE


def _measure_together(record: RankRecord, path: Path, end: float) -> int:
    try:
        # A rank that waits must be able to write so before its time is over.
        ranks = join(max(1, int(0.8 * (end - time.monotonic()))))
        record.versions[REACHES_FIRST] = "yes"
        by_node: dict[str, list[int]] = {}
        for rank, node in enumerate(ranks.all_gather_object(record.node)):
            by_node.setdefault(node, []).append(rank)
        nodes = list(by_node.values())
        steps: dict[str, Callable[[], dict[str, float]]] = {
            "the all-reduce": lambda: benchmarks.all_reduce(ranks),
            "the exchange": lambda: benchmarks.exchange(ranks, nodes),
            "the clocks": lambda: benchmarks.clock(ranks),
        }
        for name, step in steps.items():
            record.together = f"was not done with {name} within the time limit"
            write_json(path, vars(record))
            record.measures |= step()
        ranks.barrier()
    except (RuntimeError, UserError) as error:  # torch raises them when a rank does not join, or leaves
        text = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0][:300]
        if re.search(r"client socket has (timed out|failed)|failed to connect", text):
            record.versions[REACHES_FIRST] = "no"
        record.together = f"{record.together}: {text}"
        write_json(path, vars(record))
        return EXIT_FAILED
    record.together = DONE
    write_json(path, vars(record))
    with suppress(RuntimeError):  # everything is measured
        leave()
    return EXIT_DONE
