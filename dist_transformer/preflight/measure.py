"""One rank of a preflight: measures, and writes each result as soon as it is known."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dist_transformer.distributed.group import device_of_rank, join, leave
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, UserError
from dist_transformer.files import write_json
from dist_transformer.preflight import benchmarks
from dist_transformer.preflight.outliers import DONE, REACHES_FIRST
from dist_transformer.preflight.report import rank_file
from dist_transformer.processes.stacks import host_name


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
        "versions": benchmarks.versions(),
        "measures": {
            **benchmarks.counts(),
            **benchmarks.memory(device),
            "matmul_tflops": benchmarks.matmul_tflops(device),
        },
        "warnings": [],
        "together": "was not done with joining the others within the time limit" if num_ranks > 1 else DONE,
    }
    path = rank_file(folder, record["rank"])
    if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a node at once would disturb each other
        measures, record["warnings"] = benchmarks.disk(run_folder)
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
            "the all-reduce": lambda: benchmarks.all_reduce(ranks),
            "the exchange": lambda: benchmarks.exchange(ranks, nodes),
            "the clocks": lambda: benchmarks.clock(ranks),
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
