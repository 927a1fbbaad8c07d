"""A plan as printed tables, and as values for scripts."""

from collections.abc import Sequence
from typing import Any

from dist_transformer.config.model_size import checkpoint_bytes
from dist_transformer.config.schema import Config
from dist_transformer.format import table
from dist_transformer.planning.hardware import Hardware
from dist_transformer.planning.memory import USABLE_SHARE
from dist_transformer.planning.plan import Row
from dist_transformer.planning.step_time import FILLED_SHARE, MEAN_TOKENS
from dist_transformer.planning.vocabularies import count_parameters

TIMES = (
    *("nodes", "ranks", "max_tokens", "GB a GPU", "fits", "target tokens/s", "step s", "communication"),
    *("efficiency", "hours", "node-h"),
)
MEMORY = ("nodes", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "of the CPU", "fullest in")
NOTHING = "-"
ASSUMPTIONS = {"filled_share": FILLED_SHARE, "mean_sentence_tokens": MEAN_TOKENS, "usable_memory_share": USABLE_SHARE}
"""Assumptions besides the table of hardware."""

CHECKED = (
    "computed: all in the tables; memory was checked with real steps on CPUs and one H200 (within a tenth, a seventh with "
    "compile_layers), times were not: one H200 trained `big` in bf16 1.7 to 1.9 times as fast. "
    "The start of kernels is not counted: the smaller the model, the more a step takes beyond this"
)


def as_values(config: Config, gpu: str, gpus_per_node: int, hardware: Hardware, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole plan in numbers, bytes and seconds; null: no value. Keys stay the same in all releases."""
    return {
        **run_values(config, gpu, gpus_per_node, hardware),
        "checkpoint_bytes": checkpoint_bytes(count_parameters(config), config.training),
        "zero_stage": config.training.zero_stage,
        "precision": config.training.precision,
        "assumptions": ASSUMPTIONS,
        "plans": [_row_values(row) for row in rows],
    }


def run_values(config: Config, gpu: str, gpus_per_node: int, hardware: Hardware) -> dict[str, Any]:
    """Values of the run and its hardware."""
    return {
        "parameters": count_parameters(config),
        "lanes": config.data.lanes,
        "max_steps": config.training.max_steps,
        "gpu": gpu,
        "gpus_per_node": gpus_per_node,
        "hardware": {name: vars(constant) for name, constant in vars(hardware).items()},
    }


def _row_values(row: Row) -> dict[str, Any]:
    time = row.time
    return {
        "nodes": row.nodes,
        "ranks": row.num_ranks,
        "fits": row.problem is None,
        "problem": row.problem,
        "warnings": list(row.warnings),
        "max_tokens": row.max_tokens,
        "largest_micro_batch": list(row.memory.shape),
        "memory_bytes": row.memory.peak_bytes,
        "memory_parts_bytes": row.memory.parts,
        "memory_moments_bytes": row.memory.moments,
        "memory_bytes_by_zero_stage": {str(stage): count for stage, count in row.by_stage.items()},
        "cpu_memory_bytes": row.memory.cpu_bytes,
        "micro_batches_per_rank": time and time.micro_batches,
        "tokens_per_second": time and time.tokens_per_second,
        "step_seconds": time and time.seconds,
        "compute_seconds": time and time.compute_seconds,
        "communication_seconds": time and time.communication_seconds,
        "update_seconds": time and time.update_seconds,
        "idle_share": time and time.idle_share,
        "efficiency": time and time.efficiency,
        "hours": row.hours,
        "node_hours": row.node_hours,
    }


def print_plan(config: Config, gpu: str, gpus_per_node: int, hardware: Hardware, rows: Sequence[Row]) -> None:
    """Prints the planned run, two tables, warnings, and the source of each figure."""
    parameters = count_parameters(config)
    print(
        f"{config.run.name}: {parameters:,} parameters, {config.training.precision}, ZeRO {config.training.zero_stage}, "
        f"{config.data.lanes} lanes; {gpus_per_node} x {gpu} a node; a checkpoint is "
        f"{_gigabytes(checkpoint_bytes(parameters, config.training))} GB"
    )
    print(*table(TIMES, [_time_cells(row, hardware) for row in rows]), sep="\n")
    print("memory of a GPU for each ZeRO stage, GB; of the CPU for each rank (offloaded state, copy for checkpoints)")
    memory = [
        [str(row.nodes), *map(_gigabytes, (*row.by_stage.values(), row.memory.cpu_bytes)), row.memory.fullest]
        for row in rows
    ]
    print(*table(MEMORY, memory), sep="\n")
    for row in rows:
        for text in [*filter(None, [row.problem]), *row.warnings]:
            print(f"{nodes_text(row.nodes)}: {text}")
    print_sources(hardware)


def _time_cells(row: Row, hardware: Hardware) -> list[str]:
    """The cells of TIMES. "fits" is "no" if memory is too small, and "lanes" if only the lanes are too few."""
    has_memory = row.memory.peak_bytes <= hardware.memory_gb.value * 1e9 * USABLE_SHARE
    fits = "yes" if row.problem is None else "lanes" if has_memory and row.time is None else "no"
    begin = [str(row.nodes), str(row.num_ranks), str(row.max_tokens), _gigabytes(row.memory.peak_bytes), fits]
    if row.time is None:
        return [*begin, *[NOTHING] * 6]
    time = row.time
    hours = [NOTHING if value is None else f"{value:,.1f}" for value in (row.hours, row.node_hours)]
    shares = [f"{share:.0%}" for share in (time.communication_share, time.efficiency)]
    return [*begin, f"{time.tokens_per_second:,.0f}", f"{time.seconds:.3f}", *shares, *hours]


def print_sources(hardware: Hardware) -> None:
    """Prints every figure that a plan uses, grouped by source."""
    by_source: dict[str, list[str]] = {}
    for name, constant in vars(hardware).items():
        by_source.setdefault(constant.source, []).append(f"{name} {constant.value:g}")
    by_source.setdefault("assumed", []).extend(f"{name} {value:g}" for name, value in ASSUMPTIONS.items())
    for source, figures in by_source.items():
        print(f"{source}: {', '.join(figures)}")
    print(CHECKED)


def nodes_text(count: int) -> str:
    """Text like "1 node", "8 nodes"."""
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f}"
