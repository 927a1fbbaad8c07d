"""Rows of a plan, one for each number of nodes: memory, duration, and warnings before a run is started."""

from dataclasses import dataclass

from dist_transformer.config.model_size import with_effective_zero_stage
from dist_transformer.config.schema import Config
from dist_transformer.planning.hardware import Hardware
from dist_transformer.planning.memory import USABLE_SHARE, RankMemory, memory_of_rank, remedy, with_token_budget
from dist_transformer.planning.step_time import StepTime, step_time

HIGH_COMMUNICATION_SHARE = 0.3
FEW_TOKENS = 2048
"""Micro-batches of fewer tokens leave most of a GPU idle. Assumed."""


@dataclass(frozen=True)
class Row:
    """Estimates for one number of nodes.

    Attributes:
        max_tokens: data.max_tokens, or the resolved value of `auto`: the smallest possible if nothing fits.
        by_stage: peak bytes of a rank for each ZeRO stage, all else as configured.
        problem: why the run is impossible, with a remedy; None if it is possible.
        time: None for more ranks than lanes.
    """

    nodes: int
    num_ranks: int
    max_tokens: int
    memory: RankMemory
    by_stage: dict[int, int]
    time: StepTime | None
    hours: float | None
    node_hours: float | None
    problem: str | None
    warnings: tuple[str, ...]


def plan_row(config: Config, nodes: int, gpus_per_node: int, hardware: Hardware) -> Row:
    """Row for `nodes` nodes. `hardware` is that of each rank; a rank has one GPU."""

    def peak_at(stage: int) -> int:
        """Bytes of a rank: stage 0 offloads nothing, and only stage 3 offloads weights."""
        offload = "optimizer" if stage < 3 and config.training.offload != "none" else config.training.offload
        change = {"zero_stage": stage, "offload": offload if stage else "none"}
        changed = config.model_copy(update={"training": config.training.model_copy(update=change)})
        return memory_of_rank(with_effective_zero_stage(changed, num_ranks), num_ranks).peak_bytes

    num_ranks, memory_gb = nodes * gpus_per_node, hardware.memory_gb.value
    usable = memory_gb * 1e9 * USABLE_SHARE
    config = with_token_budget(with_effective_zero_stage(config, num_ranks), num_ranks, memory_gb)
    memory = memory_of_rank(config, num_ranks)
    by_stage = {stage: peak_at(stage) for stage in range(4)}
    has_lanes = num_ranks <= config.data.lanes
    time = step_time(config, num_ranks, gpus_per_node, hardware) if has_lanes else None
    problem = None
    if not has_lanes:
        problem = (
            f"more ranks ({num_ranks}) than data.lanes ({config.data.lanes}): take fewer nodes, fewer GPUs of a node or "
            "more lanes"
        )
    elif memory.peak_bytes > usable:
        problem = f"does not fit by {(memory.peak_bytes - usable) / 1e9:.1f} GB; {remedy(config, num_ranks, memory_gb)}"
    hours = time.seconds * config.training.max_steps / 3600 if time and config.training.max_steps else None
    return Row(
        nodes=nodes,
        num_ranks=num_ranks,
        max_tokens=config.data.token_budget(),
        memory=memory,
        by_stage=by_stage,
        time=time,
        hours=hours,
        node_hours=None if hours is None else hours * nodes,
        problem=problem,
        warnings=tuple(_warnings(config, time)) if time else (),
    )


def _warnings(config: Config, time: StepTime) -> list[str]:
    warnings = []
    if time.idle_share:
        warnings.append(f"{time.idle_share:.0%} of the ranks' time is idle: data.lanes is no multiple of the ranks")
    if config.data.token_budget() < FEW_TOKENS:
        warnings.append(f"few tokens a GPU: micro-batches of {config.data.token_budget()} tokens")
    if time.communication_share > HIGH_COMMUNICATION_SHARE:
        warnings.append(f"{time.communication_share:.0%} of a step is communication")
    return warnings
