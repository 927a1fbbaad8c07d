"""A plan, and a simulation of failures, as printed tables and as values for scripts."""

import math
from collections.abc import Sequence
from typing import Any

from dist_transformer.config.model_size import checkpoint_bytes
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import LOST_ATTEMPTS
from dist_transformer.format import duration, table
from dist_transformer.planning import scale
from dist_transformer.planning.failures import SLIGHT_LOSS
from dist_transformer.planning.hardware import Hardware, Planned
from dist_transformer.planning.memory import USABLE_SHARE
from dist_transformer.planning.plan import Row
from dist_transformer.planning.scale import ScaleRow, Site
from dist_transformer.planning.step_time import FILLED_SHARE, MEAN_TOKENS
from dist_transformer.planning.vocabularies import count_parameters

TIMES = ("nodes", "ranks", "max_tokens", "GB a GPU", "fits", "target tokens/s", "step s", "communication", "efficiency",
         "hours", "node-h")  # fmt: skip
MEMORY = ("nodes", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "of the CPU", "fullest in")
STEPS = ("nodes", "ranks", "lanes", "target tokens/s", "step s", "communication", "stragglers", "efficiency")
FAILURES = ("nodes", "fails every", "best", "every_steps", "about as good", "kept", "as it is", "useful", "days")
MANY_GIVE_UP = 0.01
OF_TIME = ("tokens_per_second", "compute_seconds", "communication_seconds", "update_seconds", "idle_share")
NOTHING = "-"
ASSUMPTIONS = {"filled_share": FILLED_SHARE, "mean_sentence_tokens": MEAN_TOKENS, "usable_memory_share": USABLE_SHARE}
"""Assumptions besides the table of hardware."""

CHECKED = (
    "computed: all in the tables; memory was checked with real steps on CPUs and one H200 (within a tenth), "
    "times were not: one H200 trained `big` in bf16 1.7 to 2.4 times as fast. "
    "The start of kernels is not counted: the smaller the model, the more a step takes beyond this"
)


def plan_values(planned: Planned, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole plan in numbers, bytes and seconds; null: no value. Keys stay the same in all releases."""
    config = planned.config
    return {
        **run_values(planned),
        "checkpoint_bytes": checkpoint_bytes(count_parameters(config), config.training),
        "zero_stage": config.training.zero_stage,
        "precision": config.training.precision,
        "assumptions": ASSUMPTIONS,
        "plans": [_row_values(row) for row in rows],
    }


def run_values(planned: Planned) -> dict[str, Any]:
    """Values of the run and its hardware."""
    return {
        "parameters": count_parameters(planned.config),
        "lanes": planned.config.data.lanes,
        "max_steps": planned.config.training.max_steps,
        "gpu": planned.gpu,
        "gpus_per_node": planned.gpus_per_node,
        "hardware": {name: vars(constant) for name, constant in vars(planned.hardware).items()},
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
        "step_seconds": time and time.seconds,
        **{name: time and getattr(time, name) for name in OF_TIME},
        "efficiency": time and time.efficiency,
        "hours": row.hours,
        "node_hours": row.node_hours,
    }


def print_plan(planned: Planned, rows: Sequence[Row]) -> None:
    """Prints the planned run, two tables, warnings, and the source of each figure."""
    checkpoint = checkpoint_bytes(count_parameters(planned.config), planned.config.training)
    print(f"{_run_text(planned)}; a checkpoint is {_gigabytes(checkpoint)} GB")
    print(*table(TIMES, [_time_cells(row, planned.hardware) for row in rows]), sep="\n")
    print("memory of a GPU for each ZeRO stage, GB; of the CPU for each rank (offloaded state, copy for checkpoints)")
    memory = [
        [str(row.nodes), *map(_gigabytes, (*row.by_stage.values(), row.memory.cpu_bytes)), row.memory.fullest]
        for row in rows
    ]
    print(*table(MEMORY, memory), sep="\n")
    for row in rows:
        for text in [*filter(None, [row.problem]), *row.warnings]:
            print(f"{nodes_text(row.nodes)}: {text}")
    print_sources(planned.hardware)


def _run_text(planned: Planned) -> str:
    config, training = planned.config, planned.config.training
    return (
        f"{config.run.name}: {count_parameters(config):,} parameters, {training.precision}, ZeRO {training.zero_stage}, "
        f"{config.data.lanes} lanes; {planned.gpus_per_node} x {planned.gpu} a node"
    )


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


def simulation_values(planned: Planned, site: Site, rows: Sequence[ScaleRow]) -> dict[str, Any]:
    """The whole simulation in numbers and seconds; null: no value. Keys stay the same in all releases."""
    return {
        **run_values(planned),
        "every_steps": planned.config.checkpoints.every_steps,
        "site": {name: _finite(value) for name, value in vars(site).items()},
        "simulations": [_simulated_values(row) for row in rows],
    }


def _simulated_values(row: ScaleRow) -> dict[str, Any]:
    conditions = row.conditions
    return {
        "nodes": row.nodes,
        "ranks": row.num_ranks,
        "lanes": row.lanes,
        "step_seconds": row.time.seconds,
        "tokens_per_second": row.time.tokens_per_second,
        "communication_share": row.time.communication_share,
        "straggler_factor": row.stragglers,
        "efficiency": row.efficiency,
        "between_failures_seconds": conditions.between_failures_seconds,
        "save_seconds": conditions.save_seconds,
        "write_seconds": conditions.write_seconds,
        "best_every_steps": row.interval.best_steps,
        "least_every_steps": row.interval.least_steps,
        "most_every_steps": row.interval.most_steps,
        "kept_share": row.kept_share,
        "kept_share_as_it_is": row.set_share,
        "useful_share": row.useful_share,
        "wall_seconds": _finite(row.wall_seconds),
        "attempts": _finite(row.attempts),
        "gave_up_share": row.gave_up_share,
    }


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def print_simulation(planned: Planned, site: Site, rows: Sequence[ScaleRow]) -> None:
    """Prints the simulated run, a table of steps, one of failures, advised settings, and the source of each figure."""
    print(f"{_run_text(planned)}; a node fails every {site.node_hours_between_failures:,g} hours")
    print(*table(STEPS, [_step_cells(row) for row in rows]), sep="\n")
    print("shares of node-hours; intervals are of training, without the saves; `average_last` of them fit into a run")
    print(*table(FAILURES, [_failure_cells(row) for row in rows]), sep="\n")
    for text in _remarks(planned.config, rows):
        print(text)
    shown = {name: "by size" if value is None else f"{value:g}" for name, value in vars(site).items()}
    print(f"site: {', '.join(f'{name} {text}' for name, text in shown.items())}")
    print(
        f"of checkpoints: copied with {scale.COPY_GB_PER_SECOND:g} GB/s of each rank, written with "
        f"{scale.WRITE_GB_PER_SECOND:g} GB/s of each and {scale.DISK_GB_PER_SECOND:g} GB/s of all, unless seconds are given"
    )
    print_sources(planned.hardware)


def _step_cells(row: ScaleRow) -> list[str]:
    return [
        str(row.nodes), str(row.num_ranks), str(row.lanes), f"{row.time.tokens_per_second:,.0f}",
        f"{row.time.seconds:.3f}", f"{row.time.communication_share:.0%}", f"{row.stragglers:.3f}", f"{row.efficiency:.1%}",
    ]  # fmt: skip


def _failure_cells(row: ScaleRow) -> list[str]:
    best_seconds, wall_seconds = row.interval.best_steps * row.time.seconds, _finite(row.wall_seconds)
    return [
        str(row.nodes), duration(row.conditions.between_failures_seconds), duration(best_seconds),
        f"{row.interval.best_steps:,}", f"{row.interval.least_steps:,} to {row.interval.most_steps:,}",
        f"{row.kept_share:.1%}", f"{row.set_share:.1%}", f"{row.useful_share:.1%}",
        NOTHING if wall_seconds is None else f"{wall_seconds / 86400:,.2f}",
    ]  # fmt: skip


def _remarks(config: Config, rows: Sequence[ScaleRow]) -> list[str]:
    """Advised settings for the run's own number of nodes, or the smallest one, and warnings."""
    row = next((row for row in rows if row.nodes == config.slurm.nodes), rows[0])
    interval, as_it_is = row.interval, config.checkpoints.every_steps
    is_good = row.set_share >= row.kept_share - SLIGHT_LOSS
    advice = f"every_steps={as_it_is} is good" if is_good else f"set checkpoints.every_steps={interval.best_steps}"
    remarks = [
        f"checkpoints: for {nodes_text(row.nodes)} {advice}; with {interval.least_steps} to {interval.most_steps} at most "
        f"{SLIGHT_LOSS:.1%} of the node-hours is lost beside the best, {interval.best_steps}"
        if row.kept_share >= SLIGHT_LOSS
        else f"checkpoints: on {nodes_text(row.nodes)} no interval keeps anything: a job fails sooner than it starts and saves"
    ]
    if more := [row.nodes for row in rows if row.lanes > config.data.lanes]:
        remarks.append(
            f"from {nodes_text(more[0])} on: more ranks than data.lanes={config.data.lanes}; counted with a lane for each "
            "rank, which is another recipe: larger steps, and fewer of them for the same tokens"
        )
    most = scale.patience(config.slurm)
    remarks += [
        f"{nodes_text(row.nodes)}: {row.gave_up_share:.0%} of the runs have {most} attempts in a row without a checkpoint, "
        f"after which a job is given up ({LOST_ATTEMPTS} times slurm.max_restarts_without_progress)"
        for row in rows
        if row.gave_up_share is not None and row.gave_up_share > MANY_GIVE_UP
    ]
    return remarks
