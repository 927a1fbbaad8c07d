"""Table of the assumed speeds of GPUs, links and networks, each figure with its source.

No figure of a GPU here was measured by this project: they are from the vendors' data sheets, or assumed. `--calibrate`
replaces them by the medians of a preflight.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_transformer.config.schema import Config
from dist_transformer.errors import UserError

DATA_SHEET, ASSUMED, MEASURED, GIVEN = "vendor's data sheet", "assumed", "measured by preflight", "given"


@dataclass(frozen=True)
class Constant:
    """A figure and its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its connections to others.

    Attributes:
        half_tflops, single_tflops: dense matrix products of fp16 and bf16, and of fp32, per second.
        matmul_share: share of these that a large matrix product reaches; not applied to a measured rate.
        model_share: share of a large product's rate that a whole model reaches.
        link_gb_per_second: between the GPUs of a node, in one direction.
        network_gb_per_second: a GPU's share of its node's network, in one direction.
        latency_seconds: latency of one message of a collective.
    """

    memory_gb: Constant
    half_tflops: Constant
    single_tflops: Constant
    matmul_share: Constant
    model_share: Constant
    memory_gb_per_second: Constant
    link_gb_per_second: Constant
    network_gb_per_second: Constant
    latency_seconds: Constant

    def achieved_tflops(self, precision: str) -> float:
        """TFLOP/s of a whole model: layer norms, dropout and small matrices are slower than large products."""
        rate = self.single_tflops if precision == "fp32" else self.half_tflops
        return rate.value * (1.0 if rate.source == MEASURED else self.matmul_share.value) * self.model_share.value


@dataclass(frozen=True)
class Planned:
    """A run to plan, and its nodes: `hardware` is that of each of `gpus_per_node` GPUs of the kind `gpu`."""

    config: Config
    gpu: str
    gpus_per_node: int
    hardware: Hardware


_FIGURES: dict[str, tuple[float, ...]] = {
    # memory GB, fp16/bf16 and fp32 TFLOP/s without sparsity, shares, memory GB/s, link GB/s, network GB/s of each GPU
    "h200-141g": (141, 989, 67, 0.7, 0.3, 4800, 450, 50, 1e-5),
    "h100-80g": (80, 989, 67, 0.7, 0.3, 3350, 450, 50, 1e-5),
    "a100-80g": (80, 312, 19.5, 0.7, 0.3, 2039, 300, 25, 1e-5),
    "a100-40g": (40, 312, 19.5, 0.7, 0.3, 1555, 300, 25, 1e-5),
    "l40s-48g": (48, 362, 91.6, 0.7, 0.3, 864, 32, 12.5, 1e-5),
    "rtx4090-24g": (24, 165, 82.6, 0.7, 0.3, 1008, 32, 1.25, 1e-5),
    "v100-32g": (32, 125, 15.7, 0.7, 0.3, 900, 150, 12.5, 1e-5),
    "cpu": (8, 0.05, 0.05, 0.7, 0.3, 10, 5, 1.25, 1e-4),  # one core, as a rank has in tests; all assumed
}
_SOURCES = (*[DATA_SHEET] * 3, *[ASSUMED] * 2, *[DATA_SHEET] * 2, *[ASSUMED] * 2)
HARDWARE = {
    kind: Hardware(*map(Constant, figures, [ASSUMED] * len(figures) if kind == "cpu" else _SOURCES))
    for kind, figures in _FIGURES.items()
}


def hardware_of(kind: str) -> Hardware:
    """Row of the table for `kind`. UserError: the table has none."""
    if kind not in HARDWARE:
        raise UserError(f"--gpu: expected one of {', '.join(HARDWARE)}; got {kind!r}")
    return HARDWARE[kind]


def calibrated(hardware: Hardware, report: Path) -> Hardware:
    """Hardware with the medians of a preflight's report.json in place of data sheets and assumptions.

    On GPUs preflight multiplies in a 16-bit type only, so that the rate of fp32 stays that of the data sheet. An
    all-reduce over several nodes measures the network, one within a node the link. Raises UserError: the file is no
    preflight report, or has none of the figures.
    """
    try:
        value: Any = json.loads(report.read_text(encoding="utf-8"))
        numbers = {name: float(median) for name, median in value["medians"].items()}
        medians = {name: number for name, number in numbers.items() if 0 < number < float("inf")}
        num_nodes = max(1, len(value["nodes"]))
        num_ranks, device = max(num_nodes, int(value["num_ranks"])), str(value["device"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"--calibrate: {report}: expected the report.json of a preflight, with medians, nodes, num_ranks and device; "
            f"{type(error).__name__}: {error}"
        ) from error
    on_cpu = device.startswith("cpu")
    if on_cpu != (hardware is HARDWARE["cpu"]):
        raise UserError(f"--calibrate: {report} was measured on {device}, which is not what --gpu names")
    found: dict[str, Constant] = {}
    if tflops := medians.get("matmul_tflops"):
        rates = ("half_tflops", "single_tflops") if on_cpu else ("half_tflops",)
        found |= dict.fromkeys(rates, Constant(tflops, MEASURED))
    if moved := medians.get("all_reduce_gb_per_second"):
        if num_nodes > 1:  # all GPUs of a node send at the same time
            found["network_gb_per_second"] = Constant(moved * num_nodes / num_ranks, MEASURED)
        else:
            found["link_gb_per_second"] = Constant(moved, MEASURED)
    if latency := medians.get("all_reduce_latency_seconds"):
        found["latency_seconds"] = Constant(latency / max(1, 2 * (num_ranks - 1)), MEASURED)
    if not found:
        raise UserError(
            f"--calibrate: {report}: `medians` has none of matmul_tflops, all_reduce_gb_per_second, "
            "all_reduce_latency_seconds as a number above 0; give the report.json of a finished preflight"
        )
    return replace(hardware, **found)
