"""How busy the machines are between two log lines: processors, memory, network and GPUs of each node.

The first rank of each node samples in a thread; the means of all nodes come together on rank 0, once a log line:

    {"event": "system", "step": 50, "n1/cpu_percent": 81.2, "n1/memory_gb": 20.1, "n1/gpu0/percent": 97.0, ...}

MLflow shows keys that begin with `system/` on a page of their own. What GPUs do is asked of NVML, through torch.
"""

import logging
import os
import platform
import threading
from collections import defaultdict
from types import TracebackType

import psutil
import torch

from dist_transformer.distributed import Ranks

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
GIGABYTE = 1e9
MEGABYTE = 1e6


class NodeSampler:
    """Samples this node in a thread, on the first rank of each node; on the others it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._name = os.environ.get("SLURMD_NODENAME") or platform.node()
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._ended = threading.Event()
        self._num_gpus = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
        self._thread = threading.Thread(target=self._sample_until_ended, name="system metrics", daemon=True)

    def __enter__(self) -> "NodeSampler":
        if self._ranks.rank_of_node == 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def means(self) -> dict[str, float]:
        """The means since the last call, of all nodes: `<node>/<key>` (collective)."""
        with self._lock:
            mine = {f"{self._name}/{key}": round(sum(v) / len(v), 3) for key, v in self._samples.items()}
            self._samples.clear()
        return {key: value for part in self._ranks.gather(mine) for key, value in part.items()}

    def _sample_until_ended(self) -> None:
        psutil.cpu_percent()  # the use of processors is counted from one call to the next
        before = psutil.net_io_counters()
        while not self._ended.wait(SAMPLE_SECONDS):
            after = psutil.net_io_counters()
            sample = {
                "cpu_percent": psutil.cpu_percent(),
                "memory_gb": psutil.virtual_memory().used / GIGABYTE,
                "sent_mb_per_second": (after.bytes_sent - before.bytes_sent) / MEGABYTE / SAMPLE_SECONDS,
                "received_mb_per_second": (after.bytes_recv - before.bytes_recv) / MEGABYTE / SAMPLE_SECONDS,
                **self._gpus(),
            }
            before = after
            with self._lock:
                for key, value in sample.items():
                    self._samples[key].append(value)

    def _gpus(self) -> dict[str, float]:
        values: dict[str, float] = {}
        try:
            for gpu in range(self._num_gpus):
                values[f"gpu{gpu}/percent"] = torch.cuda.utilization(gpu)
                values[f"gpu{gpu}/memory_gb"] = torch.cuda.device_memory_used(gpu) / GIGABYTE
                values[f"gpu{gpu}/watts"] = torch.cuda.power_draw(gpu) / 1000
                values[f"gpu{gpu}/celsius"] = torch.cuda.temperature(gpu)
        except Exception as error:  # noqa: BLE001 - NVML has its own errors, and training must not end for one
            log.warning("the GPUs of %s are not measured any more: %s: %s", self._name, type(error).__name__, error)
            self._num_gpus = 0
        return values
