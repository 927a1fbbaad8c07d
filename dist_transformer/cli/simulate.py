"""simulate: useful share of a run's node-hours despite failures, saves and slow ranks. Nothing is started."""

import json
import math
from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, RunArgument
from dist_transformer.cli.plan import (
    AllReduce,
    AsJson,
    Calibrate,
    Gpu,
    GpusPerNode,
    TokensPerSecond,
    configured,
    measured_hardware,
    must_be_finite,
    numbers_of_nodes,
)
from dist_transformer.cluster.checks import parse_time_limit
from dist_transformer.config.slurm_schema import SlurmConfig
from dist_transformer.errors import UserError


def simulate_command(
    run: RunArgument,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes.")] = "1,2,4,8,16,32,64,128,256,512,1024",
    node_hours_between_failures: Annotated[
        float,
        typer.Option(min=1e-3, help="Mean, of one node. 6300: 2048 nodes failed 419 times in 54 days (Llama 3)."),
    ] = 6300,
    detect_seconds: Annotated[
        float, typer.Option(min=0, help="Until a dead node that has the batch script is noticed. 300: Slurm's default.")
    ] = 300,
    requeue_seconds: Annotated[
        float,
        typer.Option(min=0, help="From then until the job runs again. 120: Slurm's default; a busy queue takes more."),
    ] = 120,
    restart_seconds: Annotated[
        float, typer.Option(min=0, help="From the start of an attempt to its first step. 60: assumed.")
    ] = 60,
    save_seconds: Annotated[
        float | None, typer.Option(min=0, help="Training stands still for a checkpoint; else by its size.")
    ] = None,
    write_seconds: Annotated[
        float | None, typer.Option(min=0, help="Then until it is whole, as the log says; else by its size.")
    ] = None,
    lane_spread: Annotated[
        float, typer.Option(min=0, max=2, help="Standard deviation of a micro-batch's time, as a share of its mean.")
    ] = 0.03,
    gpu: Gpu = "h200-141g",
    gpus_per_node: GpusPerNode = None,
    calibrate: Calibrate = None,
    tokens_per_second: TokensPerSecond = None,
    all_reduce: AllReduce = None,
    as_json: AsJson = False,
) -> None:
    """Share of its node-hours that a run keeps on each number of nodes despite failures, and how often to save."""
    from dist_transformer.planning.scale import Site, scale_row
    from dist_transformer.planning.simulation_tables import as_values, print_simulation

    counts = numbers_of_nodes(nodes)
    config, ranks_per_node = configured(run, overrides, gpus_per_node)
    hardware = measured_hardware(config, ranks_per_node, gpu, calibrate, tokens_per_second, all_reduce)
    site = Site(
        node_hours_between_failures,
        detect_seconds,
        requeue_seconds,
        restart_seconds,
        save_seconds,
        write_seconds,
        lane_spread,
        limit_seconds=min(_limit_seconds(config.slurm), 3600 * (config.training.max_hours or math.inf)),
    )
    must_be_finite(**{name: value for name, value in vars(site).items() if name != "limit_seconds"})
    rows = [scale_row(config, count, ranks_per_node, hardware, site) for count in counts]
    if as_json:
        print(json.dumps(as_values(config, gpu, ranks_per_node, hardware, site, rows), indent=2))
    else:
        print_simulation(config, gpu, ranks_per_node, hardware, site, rows)


def _limit_seconds(slurm: SlurmConfig) -> float:
    """Seconds from the beginning of a job to the request to save; inf: no limit."""
    try:
        limit = parse_time_limit(slurm.time_limit)
    except ValueError as error:
        raise UserError(
            f"slurm.time_limit: {slurm.time_limit!r}: expected hours:minutes:seconds or days-hours:minutes:seconds"
        ) from error
    if limit is None:
        return math.inf
    if limit <= slurm.signal_seconds:
        raise UserError(
            f"slurm.time_limit: {slurm.time_limit} is {limit} s, but the job is signalled to save {slurm.signal_seconds} s "
            "before its end (slurm.signal_seconds); give more"
        )
    return limit - slurm.signal_seconds
