"""Outliers among the nodes: pure functions of the ranks' records. No torch: the batch script's own Python runs this.

A node's figure is that of its worst rank, and it is compared with the median of the nodes. With an even number of nodes
the median is the better of the two in the middle, so that of two nodes that differ the slower one is named.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

Record = Mapping[str, Any]
"""Record of a rank: rank, node, num_ranks, ranks_per_node, measures, versions, warnings, together."""
DONE = "done"
"""The field `together` of a rank that completed all measurements."""
REACHES_FIRST = "reaches rank 0"
"""Key among the versions, because it is compared like them: "yes" or "no" for a rank that tried to join the others."""
LARGEST_CLOCK_SKEW_SECONDS = 1.0
EXCLUDED_SHARE = 10
"""One node in so many may be excluded, and at least one: if most look bad, the measurement is at fault."""


@dataclass(frozen=True)
class Measure:
    """One measurement of a rank.

    Attributes:
        is_compared: more is better; False: the same on all nodes, or compared in its own way.
        slack: factor by which the tolerance is divided, for measurements subject to chance and other users.
    """

    name: str
    title: str
    unit: str
    is_compared: bool = False
    slack: float = 1.0


MEASURES = (
    Measure("matmul_tflops", "matmul", "TFLOP/s", True),
    Measure("exchange_gb_per_second", "exchange", "GB/s", True),
    Measure("all_reduce_gb_per_second", "all-reduce", "GB/s"),
    Measure("all_reduce_latency_seconds", "latency", "s"),
    Measure("clock_offset_seconds", "clock", "s"),
    Measure("disk_write_mb_per_second", "disk write", "MB/s", True, slack=8),
    Measure("disk_read_mb_per_second", "disk read", "MB/s", True, slack=8),
    Measure("run_disk_free_gb", "run disk", "GB free"),
    Measure("temporary_disk_free_gb", "temp disk", "GB free"),
    Measure("memory_total_gb", "memory", "GB"),
    Measure("memory_free_gb", "free memory", "GB"),
    Measure("gpu_memory_total_gb", "GPU memory", "GB", True),
    Measure("gpu_memory_free_gb", "free GPU memory", "GB", True),
    Measure("gpus", "GPUs", ""),
    Measure("ranks", "ranks", ""),
    Measure("cpus", "CPUs", "", True),
)
_BY_NAME = {measure.name: measure for measure in MEASURES}

Values = dict[str, dict[str, float]]
"""Values by node and measure."""


@dataclass(frozen=True)
class Outlier:
    """A node's figure that stands out. `ratio`: its quality relative to the others: 1 as good, 0 useless."""

    node: str
    measure: str
    value: float | str
    median: float | str
    ratio: float

    @property
    def text(self) -> str:
        """Text like "matmul 0.21 of the median (12 of 57 TFLOP/s)"."""
        if self.measure == "clock_offset_seconds":
            return f"clock {float(self.value) - float(self.median):+.3g} s away from the median"
        if self.measure == REACHES_FIRST:
            own, others = ("cannot", "can") if "no" in str(self.value) else ("can", "cannot")
            return f"{own} reach rank 0, most nodes {others}"
        if self.measure not in _BY_NAME:
            return f"{self.measure} is {self.value}, most have {self.median}"
        measure = _BY_NAME[self.measure]
        if measure.name in ("gpus", "ranks"):
            return f"{self.value:g} {measure.title} of {self.median:g}"
        figures = f"({self.value:.3g} of {self.median:.3g} {measure.unit}".rstrip() + ")"
        return f"{measure.title} {self.ratio:.2g} of the median {figures}"


@dataclass(frozen=True)
class Judgement:
    """Result of `judge`. `bad`: every node that stands out, the worst first; `exclude`: as many of them as allowed."""

    values: Values
    medians: dict[str, float]
    outliers: list[Outlier]
    silent: list[str]
    bad: list[str]
    exclude: list[str]
    warnings: list[str]
    complete: bool


def judge(records: Iterable[Record], nodes: Sequence[str], tolerance: float) -> Judgement:
    """Compares the nodes of a job.

    Args:
        records: records of the ranks that wrote one, in any order.
        nodes: all nodes of the job; nodes missing here are taken from `records`.
        tolerance: a node that reaches less than this share of the median stands out.
    """
    by_node: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: int(record["rank"])):
        by_node[record["node"]].append(record)
    all_nodes = sorted({*nodes, *by_node})
    values = {node: _worst_of(own) for node, own in sorted(by_node.items())}
    known = {name: [own[name] for own in values.values() if name in own] for name in _BY_NAME}
    medians = {name: median_high(numbers) for name, numbers in known.items() if numbers}
    outliers = [*_outliers(by_node, values, medians, tolerance)]
    silent = [node for node in all_nodes if node not in by_node] if by_node else []
    worst = dict.fromkeys(silent, -1.0)
    for found in outliers:
        worst[found.node] = min(found.ratio, worst.get(found.node, found.ratio))
    bad = sorted(worst, key=lambda node: (worst[node], node))
    room = max(1, len(all_nodes) // EXCLUDED_SHARE)
    missing = len(silent) + sum(found.measure == "ranks" for found in outliers)
    return Judgement(
        values=values,
        medians=medians,
        outliers=sorted(outliers, key=lambda found: (found.node, found.ratio, found.measure)),
        silent=silent,
        bad=bad,
        exclude=bad[:room],
        warnings=_warnings(by_node, values, bad, room),
        complete=bool(by_node) and not missing and all(r["together"] == DONE for own in by_node.values() for r in own),
    )


def _worst_of(records: list[Record]) -> dict[str, float]:
    worst = {}
    for name in _BY_NAME:
        own = [float(record["measures"][name]) for record in records if name in record["measures"]]
        if own:
            worst[name] = max(own) if name == "all_reduce_latency_seconds" else min(own)
    expected = [float(record["measures"].get("gpus_expected", 0)) for record in records]
    return {**worst, "ranks": float(len(records)), "gpus_expected": max(expected)}


def _outliers(
    by_node: Mapping[str, list[Record]], values: Values, medians: Mapping[str, float], tolerance: float
) -> Iterator[Outlier]:
    for measure in MEASURES:
        median = medians.get(measure.name, 0.0)
        for node, own in values.items() if measure.is_compared and median > 0.0 else ():
            if measure.name in own and (ratio := own[measure.name] / median) < tolerance / measure.slack:
                yield Outlier(node, measure.name, own[measure.name], median, ratio)
    # Rank 0's clock may be the wrong one; of two nodes' it is unknown which is.
    offsets = {node: own["clock_offset_seconds"] for node, own in values.items() if "clock_offset_seconds" in own}
    for node, own in values.items():
        gpus, num_ranks = max(own["gpus_expected"], medians.get("gpus", 0.0)), int(by_node[node][0]["ranks_per_node"])
        if own.get("gpus", gpus) < gpus:
            yield Outlier(node, "gpus", own["gpus"], gpus, own["gpus"] / gpus)
        if own["ranks"] < num_ranks:  # some wrote nothing, as with a GPU that hangs
            yield Outlier(node, "ranks", own["ranks"], float(num_ranks), own["ranks"] / num_ranks)
        skew = abs(offsets[node] - medians["clock_offset_seconds"]) if len(offsets) > 2 and node in offsets else 0.0
        if skew > LARGEST_CLOCK_SKEW_SECONDS:
            ratio = LARGEST_CLOCK_SKEW_SECONDS / skew
            yield Outlier(node, "clock_offset_seconds", offsets[node], medians["clock_offset_seconds"], ratio)
    for name, held in _versions(by_node).items():
        most, count = Counter(held.values()).most_common(1)[0]
        if 2 * count > len(held):
            yield from (Outlier(node, name, version, most, 0.0) for node, version in held.items() if version != most)


def _versions(by_node: Mapping[str, list[Record]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in sorted({name for own in by_node.values() for record in own for name in record["versions"]}):
        of = {node: {str(r["versions"].get(name, "none")) for r in own} for node, own in sorted(by_node.items())}
        found[name] = {node: "/".join(sorted(versions)) for node, versions in of.items()}
    return found


def _warnings(by_node: Mapping[str, list[Record]], values: Values, bad: list[str], room: int) -> list[str]:
    warnings = [f"{node}: {text}" for node, own in sorted(by_node.items()) for r in own for text in r["warnings"]]
    for name, held in _versions(by_node).items():
        if 2 * max(Counter(held.values()).values()) <= len(held):
            warnings.append(f"{name} differs: " + ", ".join(f"{node} {version}" for node, version in held.items()))
    offsets = [own["clock_offset_seconds"] for own in values.values() if "clock_offset_seconds" in own]
    if len(offsets) == 2 and abs(offsets[0] - offsets[1]) > LARGEST_CLOCK_SKEW_SECONDS:
        warnings.append(f"the clocks of the two nodes are {abs(offsets[0] - offsets[1]):.3g} s apart")
    if len(bad) > room:
        most = f"but at most {room} may be excluded: look at what they share"
        warnings.append(f"{len(bad)} nodes stand out ({', '.join(bad)}), {most}")
    return warnings
