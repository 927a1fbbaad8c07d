"""plan, simulate: memory, time and useful node-hours of a run on each number of nodes. Nothing is started."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, RunArgument
from dist_transformer.cluster.checks import time_problems
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.queue import seconds_of
from dist_transformer.config.model_size import automatic_precision, with_precision
from dist_transformer.errors import UserError
from dist_transformer.planning.hardware import Planned, calibrated, hardware_of
from dist_transformer.run.read_run import read_run

MOST_NODES = 100_000
LARGEST = 1e18

Gpu = Annotated[str, typer.Option(help="Kind of GPU: h200-141g, a100-80g, ..., cpu; a wrong one names all.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, max=64, help="GPUs of a node; else slurm.ranks_per_node.")]
Calibrate = Annotated[Path | None, typer.Option(help="A preflight's report.json: medians in place of the table's.")]
TokensPerSecond = Annotated[float | None, typer.Option(min=1e-3, help="Measured: real target tokens/s of a lone rank.")]
AllReduce = Annotated[float | None, typer.Option("--all-reduce-gb-per-second", min=1e-6, help="Measured among nodes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def plan_command(
    run: RunArgument,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes: 1,2,4,8.")] = "1,2,4,8",
    gpu: Gpu = "h200-141g",
    gpus_per_node: GpusPerNode = None,
    calibrate: Calibrate = None,
    tokens_per_second: TokensPerSecond = None,
    all_reduce: AllReduce = None,
    as_json: AsJson = False,
) -> None:
    """Memory per GPU, step time and hours of a run on each number of nodes, and which settings fit."""
    from dist_transformer.planning.plan import plan_row
    from dist_transformer.planning.tables import plan_values, print_plan

    counts = _numbers_of_nodes(nodes)
    rates = {"tokens_per_second": tokens_per_second, "all_reduce_gb_per_second": all_reduce}
    planned = _planned(run, overrides, gpu, gpus_per_node, calibrate, **rates)
    rows = [plan_row(planned.config, count, planned.gpus_per_node, planned.hardware) for count in counts]
    if as_json:
        print(json.dumps(plan_values(planned, rows), indent=2))
    else:
        print_plan(planned, rows)


def simulate_command(
    run: RunArgument,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes.")] = "1,2,4,8,16,32,64,128,256,512,1024",
    node_hours_between_failures: Annotated[
        float, typer.Option(min=1e-3, help="Mean, of one node. 6300: 2048 nodes failed 419 times in 54 days (Llama 3).")
    ] = 6300,
    detect_seconds: Annotated[
        float, typer.Option(min=0, help="Until a dead node that has the batch script is noticed. 300: Slurm's default.")
    ] = 300,
    requeue_seconds: Annotated[
        float, typer.Option(min=0, help="From then until the job runs again. 120: Slurm's default; more if busy.")
    ] = 120,
    restart_seconds: Annotated[float, typer.Option(min=0, help="Then until its first step. 60: assumed.")] = 60,
    save_seconds: Annotated[float | None, typer.Option(min=0, help="Pause for a checkpoint; else by size.")] = None,
    write_seconds: Annotated[float | None, typer.Option(min=0, help="Then until it is whole; else by size.")] = None,
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
    from dist_transformer.planning.tables import print_simulation, simulation_values

    counts = _numbers_of_nodes(nodes)
    rates = {"tokens_per_second": tokens_per_second, "all_reduce_gb_per_second": all_reduce}
    planned = _planned(run, overrides, gpu, gpus_per_node, calibrate, **rates)
    config = planned.config
    for problem in time_problems(config.slurm):
        raise UserError(problem)
    limit = seconds_of(config.slurm.time_limit) or math.inf
    site = Site(
        node_hours_between_failures, detect_seconds, requeue_seconds, restart_seconds, save_seconds, write_seconds,
        lane_spread, limit_seconds=min(limit - config.slurm.signal_seconds, 3600 * (config.training.max_hours or math.inf)),
    )  # fmt: skip
    _must_be_finite(**{name: value for name, value in vars(site).items() if name != "limit_seconds"})
    rows = [scale_row(config, count, planned.gpus_per_node, planned.hardware, site) for count in counts]
    if as_json:
        print(json.dumps(simulation_values(planned, site, rows), indent=2))
    else:
        print_simulation(planned, site, rows)


def _planned(
    run: Path, overrides: list[str] | None, gpu: str, gpus: int | None, calibrate: Path | None, **rates: float | None
) -> Planned:
    """The run to plan, with its vocabulary counted, and the table's row of `gpu`, with figures measured by a preflight or the
    user in its place.

    UserError: the table has no such kind, `calibrate` is no preflight report, or a figure is no number.
    """
    from dist_transformer.planning.step_time import with_given_rates
    from dist_transformer.planning.vocabularies import with_counted_pieces

    config = with_counted_pieces(fill_from_profile(read_run(run, overrides, check_files=False)[0]))
    config = with_precision(config, automatic_precision(gpu != "cpu"))
    ranks = gpus or config.slurm.ranks_per_node
    _must_be_finite(**rates)
    hardware = hardware_of(gpu) if calibrate is None else calibrated(hardware_of(gpu), calibrate)
    return Planned(config, gpu, ranks, with_given_rates(hardware, config, ranks, **rates))


def _must_be_finite(**options: float | None) -> None:
    """Raises UserError if an option is `inf` or `nan`, or above LARGEST, so that arithmetic on it would overflow."""
    for name, value in options.items():
        if value is not None and not value <= LARGEST:
            raise UserError(f"--{name.replace('_', '-')}: expected a finite number, at most {LARGEST:g}; got {value:g}")


def _numbers_of_nodes(text: str) -> list[int]:
    """Parses --nodes. UserError: it is no list of whole numbers from 1 on."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_NODES for word in words):
        raise UserError(f"--nodes: expected whole numbers from 1 on with commas between them, as 1,2,4,8; got {text!r}")
    return sorted({int(word) for word in words})
