"""plan: what a run will take on each number of nodes, before it is submitted. Arithmetic: nothing is started."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, RunArgument, read_run
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.errors import UserError

MOST_NODES = 100_000


def plan_command(
    run: RunArgument,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes: 1,2,4,8.")] = "1,2,4,8",
    gpu: Annotated[
        str, typer.Option(help="Kind of GPU: h200-141g, a100-80g, ...; a wrong one names all.")
    ] = "h200-141g",
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, max=64, help="GPUs, and so ranks, of each node; else slurm.ranks_per_node.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="A preflight's report.json, whose medians replace the table's figures.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Memory per GPU, step time and hours of a run on each number of nodes, and which settings fit."""
    from dist_transformer.cli.plan_tables import as_values, print_plan
    from dist_transformer.cli.vocabulary_sizes import with_counted_pieces
    from dist_transformer.planning.hardware import calibrated, hardware_of
    from dist_transformer.planning.plan import plan_row

    hardware = hardware_of(gpu)
    if calibrate is not None:
        hardware = calibrated(hardware, calibrate)
    counts = _numbers_of_nodes(nodes)
    config = with_counted_pieces(fill_from_profile(read_run(run, overrides, check_files=False)[0]))
    ranks_per_node = gpus_per_node or config.slurm.ranks_per_node
    rows = [plan_row(config, count, ranks_per_node, hardware) for count in counts]
    if as_json:
        print(json.dumps(as_values(config, gpu, ranks_per_node, hardware, rows), indent=2))
    else:
        print_plan(config, gpu, ranks_per_node, hardware, rows)


def _numbers_of_nodes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_NODES for word in words):
        raise UserError(f"--nodes: expected whole numbers from 1 on with commas between them, as 1,2,4,8; got {text!r}")
    return sorted({int(word) for word in words})
