"""Load of the machines between two log lines: processors, memory, network and GPUs of each node.

The first rank of each node samples in a thread; the means of all nodes are recorded together with some log lines:

    {"event": "system", "step": 50, "n1/cpu_percent": 81.2, "n1/memory_gb": 20.1, "n1/gpu0/percent": 97.0, ...}

With many nodes only their spread is recorded: "min/cpu_percent", "mean/cpu_percent", "max/gpu/percent". MLflow shows
keys that begin with `system/` on a page of their own. Values of GPUs are from NVML (nvidia-ml-py), through torch.
"""

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from statistics import fmean

import psutil
import torch

from dist_transformer.distributed.group import Ranks
from dist_transformer.processes.stacks import host_name

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
FIRST_SAMPLE_SECONDS = 0.5
"""Time of the first sample, so that a run of seconds has one too."""
MOST_NODES = 16
"""Maximum number of nodes recorded one by one: 17 with 8 GPUs each would be 612 curves, too many for a chart."""


class NodeSampler:
    """Samples this node in a thread on the first rank of each node; does nothing on the others."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._name = host_name()
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._ended = threading.Event()
        self._measures: dict[str, Callable[[], dict[str, float]]] = {
            "the processors": lambda: {"cpu_percent": psutil.cpu_percent()},
            "the memory": lambda: {"memory_gb": psutil.virtual_memory().used / 1e9},
            "the network": _Network(),
        }
        if ranks.device.type == "cuda":
            self._measures["the GPUs"] = partial(_gpus, torch.cuda.device_count())
        self._thread = threading.Thread(target=self._sample_until_ended, name="system metrics", daemon=True)

    def __enter__(self) -> "NodeSampler":
        if self._ranks.rank_of_node == 0:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def means(self) -> dict[str, float]:
        """Returns the means since the last call, of all nodes: `<node>/<key>` (collective); see MOST_NODES."""
        with self._lock:
            mine = {key: fmean(values) for key, values in self._samples.items()}
            self._samples.clear()
        parts: list[tuple[str, dict[str, float]]] = self._ranks.all_gather_object((self._name, mine))
        num_nodes = -(-self._ranks.num_ranks // self._ranks.ranks_per_node)
        if num_nodes > MOST_NODES:
            found = _spread([means for _, means in parts])
        else:
            found = {f"{name}/{key}": value for name, means in parts for key, value in means.items()}
        return {key: round(value, 3) for key, value in found.items()}

    def _sample_until_ended(self) -> None:
        self._sample()  # the load of processors and network is measured between two calls
        seconds = FIRST_SAMPLE_SECONDS
        while not self._ended.wait(seconds):
            seconds = SAMPLE_SECONDS
            sample = self._sample()
            with self._lock:
                for key, value in sample.items():
                    self._samples[key].append(value)

    def _sample(self) -> dict[str, float]:
        """Measures all quantities. Logs one warning for each that cannot be measured, and skips it from then on."""
        values: dict[str, float] = {}
        for name, measure in list(self._measures.items()):
            try:
                values |= measure()
            except Exception as error:  # noqa: BLE001 - NVML and containers have errors of their own
                del self._measures[name]
                kind = type(error).__name__
                log.warning("%s of %s: not measured any more: %s: %s", name, self._name, kind, error)
        return values


class _Network:
    """Measures megabytes per second since the last call; {} at the first."""

    def __init__(self) -> None:
        self._before: tuple[float, int, int] | None = None

    def __call__(self) -> dict[str, float]:
        counters = psutil.net_io_counters()
        if counters is None:
            raise OSError("this system does not count what its interfaces send")
        now, before = (time.monotonic(), counters.bytes_sent, counters.bytes_recv), self._before
        self._before = now
        if before is None:
            return {}
        seconds, sent, received = (value - earlier for value, earlier in zip(now, before, strict=True))
        return {"sent_mb_per_second": sent / 1e6 / seconds, "received_mb_per_second": received / 1e6 / seconds}


def _gpus(count: int) -> dict[str, float]:
    values: dict[str, float] = {}
    for gpu in range(count):
        values[f"gpu{gpu}/percent"] = torch.cuda.utilization(gpu)
        values[f"gpu{gpu}/memory_gb"] = torch.cuda.device_memory_used(gpu) / 1e9
        values[f"gpu{gpu}/watts"] = torch.cuda.power_draw(gpu) / 1000
        values[f"gpu{gpu}/celsius"] = torch.cuda.temperature(gpu)
    return values


def _spread(nodes: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns min, mean and max of each quantity over all nodes or GPUs: `min/cpu_percent`, `max/gpu/percent`."""
    together: dict[str, list[float]] = defaultdict(list)
    for means in nodes:
        for key, value in means.items():
            together[re.sub(r"^gpu\d+/", "gpu/", key)].append(value)
    return {
        f"{name}/{key}": of(values)
        for key, values in together.items()
        for name, of in (("min", min), ("mean", fmean), ("max", max))
    }


def process_began() -> float:
    """Returns when this process began, or the one that it was forked from, which has the same command line."""
    process = psutil.Process()
    with suppress(psutil.Error):
        if (parent := process.parent()) is not None and parent.cmdline() == process.cmdline():
            process = parent
    since_boot: float = process.create_time() - psutil.boot_time()  # the kernel's time of its boot is in whole seconds
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 3)
