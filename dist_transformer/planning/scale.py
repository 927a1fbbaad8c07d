"""Useful share of a run's node-hours on each number of nodes: collectives, ranks that wait for each other, failures.

docs/scaling.md has the model. The slowest of n ranks takes E[max] = integral of z-quantiles x d(Phi(z)^n); the sum of a
rank's lanes is approximated as log-normal of the same mean and variance (Fenton 1960).
"""

import math
from dataclasses import dataclass, replace

from dist_transformer.config.model_size import checkpoint_bytes
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import LOST_ATTEMPTS, SlurmConfig
from dist_transformer.planning.failures import Conditions, SaveInterval, barren_share, best_interval, expected_attempt
from dist_transformer.planning.hardware import Hardware
from dist_transformer.planning.memory import with_token_budget
from dist_transformer.planning.step_time import StepTime, step_time
from dist_transformer.planning.vocabularies import count_parameters

COPY_GB_PER_SECOND = 8.0
"""Speed of copying a rank's part of a checkpoint into memory. Measured on a CPU: benchmarks/checkpoint.py."""
WRITE_GB_PER_SECOND, DISK_GB_PER_SECOND = 0.2, 2.0
"""Write speed of a rank with checksums, measured on a CPU; speed of the disk shared by all ranks, assumed."""
RECOVERY_SECONDS = 10.0
"""From the failure of a node that does not have the batch script until ranks start on the others (cluster/batch_job.py)."""


@dataclass(frozen=True)
class Site:
    """Failures and times of a site, as given by the user; None: computed from the size of a checkpoint.

    Attributes:
        detect_seconds: for the node of the batch script, after whose failure the job is requeued.
        lane_spread: standard deviation of the time of a micro-batch, as a share of its mean.
        limit_seconds: duration of an attempt until it is signalled to save; inf: no limit.
    """

    node_hours_between_failures: float
    detect_seconds: float
    requeue_seconds: float
    restart_seconds: float
    save_seconds: float | None
    write_seconds: float | None
    lane_spread: float
    limit_seconds: float


@dataclass(frozen=True)
class ScaleRow:
    """Estimates for one number of nodes.

    Attributes:
        lanes: data.lanes, or one for each rank if there are more ranks, which is another training recipe.
        time: a step including the wait for the slowest rank.
        stragglers: time of the slowest rank's micro-batches over that of a single rank.
        interval: best checkpoint interval.
        kept_share: share of node-hours with the best interval; `set_share`: with checkpoints.every_steps as configured.
        useful_share: share of node-hours spent on micro-batches whose step was kept.
        attempts, wall_seconds: mean of this run from its first start to its end; None without a number of steps, infinite
            if it does not end.
        gave_up_share: share of runs with `patience` attempts in a row that make no checkpoint.
    """

    nodes: int
    num_ranks: int
    lanes: int
    time: StepTime
    stragglers: float
    efficiency: float
    conditions: Conditions
    interval: SaveInterval
    kept_share: float
    set_share: float
    useful_share: float
    attempts: float | None
    wall_seconds: float | None
    gave_up_share: float | None


def scale_row(config: Config, nodes: int, ranks_per_node: int, hardware: Hardware, site: Site) -> ScaleRow:
    """Row for `nodes` nodes, with the best interval between saves."""
    num_ranks = nodes * ranks_per_node
    config = with_token_budget(config, num_ranks, hardware.memory_gb.value)
    lanes, tokens = max(config.data.lanes, num_ranks), config.data.lanes
    config = config.model_copy(update={"data": config.data.model_copy(update={"lanes": lanes})})
    alone = step_time(config, num_ranks, ranks_per_node, hardware)
    stragglers = straggler_factor(num_ranks, alone.micro_batches, site.lane_spread)
    time = replace(alone, compute_seconds=alone.compute_seconds * stragglers)
    efficiency = alone.compute_seconds * (1 - alone.idle_share) / time.seconds
    conditions = conditions_of(site, nodes, num_ranks, checkpoint_bytes(count_parameters(config), config.training))
    # The run trains on the configured number of tokens: fewer steps if the steps became larger.
    num_steps = math.inf if config.training.max_steps is None else max(1.0, config.training.max_steps * tokens / lanes)
    interval = best_interval(conditions, time.seconds, max(1, num_steps / config.checkpoints.average_last))
    best = expected_attempt(conditions, interval.best_steps * time.seconds)
    barren = barren_share(conditions, interval.best_steps * time.seconds)
    as_set = expected_attempt(conditions, config.checkpoints.every_steps * time.seconds)
    work = None if math.isinf(num_steps) else num_steps * time.seconds
    attempts = None if work is None else (work / best.kept if best.kept else math.inf)
    return ScaleRow(
        nodes=nodes,
        num_ranks=num_ranks,
        lanes=lanes,
        time=time,
        stragglers=stragglers,
        efficiency=efficiency,
        conditions=conditions,
        interval=interval,
        kept_share=best.kept_share,
        set_share=as_set.kept_share,
        useful_share=efficiency * best.kept_share,
        attempts=attempts,
        wall_seconds=None if attempts is None else attempts * best.wall,
        gave_up_share=None if attempts is None else given_up_share(attempts, barren, patience(config.slurm)),
    )


def given_up_share(attempts: float, barren: float, patience: int) -> float:
    """Share of runs of so many attempts that have `patience` in a row without a checkpoint, each with probability `barren`:
    such rows begin nearly at random (Feller, "An Introduction to Probability Theory" 1, XIII.7)."""
    return 1.0 if barren == 1.0 else -math.expm1(-attempts * (1 - barren) * barren**patience)


def patience(slurm: SlurmConfig) -> int:
    """Attempts in a row without a checkpoint after which a job whose nodes fail is given up (cluster/requeue.py)."""
    return LOST_ATTEMPTS * slurm.max_restarts_without_progress + 1


def conditions_of(site: Site, nodes: int, num_ranks: int, num_bytes: int) -> Conditions:
    """Conditions of a job on `nodes` nodes; each rank copies and writes its part of a checkpoint of `num_bytes`."""
    gigabytes = num_bytes / 1e9
    save, write = site.save_seconds, site.write_seconds
    is_requeued = 1 / nodes  # the share of failures of the node that has the batch script
    return Conditions(
        between_failures_seconds=site.node_hours_between_failures * 3600 / nodes,
        detect_seconds=is_requeued * site.detect_seconds + (1 - is_requeued) * RECOVERY_SECONDS,
        requeue_seconds=is_requeued * site.requeue_seconds,
        restart_seconds=site.restart_seconds,
        save_seconds=gigabytes / num_ranks / COPY_GB_PER_SECOND if save is None else save,
        write_seconds=gigabytes / min(num_ranks * WRITE_GB_PER_SECOND, DISK_GB_PER_SECOND) if write is None else write,
        limit_seconds=site.limit_seconds,
    )


def straggler_factor(num_ranks: int, micro_batches: int, lane_spread: float) -> float:
    """Expected time of the slowest of `num_ranks` ranks over the mean, each with `micro_batches` in a step."""
    variance = math.log1p(lane_spread**2 / micro_batches)
    deviation, width = math.sqrt(variance), 0.01
    total = 0.0
    for place in range(-900, 901):
        z = place * width
        share_below = math.erfc(-z / math.sqrt(2)) / 2
        density = num_ranks * share_below ** (num_ranks - 1) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        total += width * density * math.exp(deviation * z - variance / 2)
    return total
