"""preflight: checks of the machines. As a rank (RANK is set) it measures its share, otherwise this machine."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cluster.script import PREFLIGHT_SECONDS, PREFLIGHT_TOLERANCE
from dist_transformer.errors import UserError


def preflight_command(
    folder: Annotated[Path, typer.Option(help="Gets what is measured and report.json.")] = Path("preflight"),
    run_folder: Annotated[Path | None, typer.Option(help="Run folder whose disk is tried; none: --folder.")] = None,
    seconds: Annotated[int, typer.Option(min=10, help="Time limit.")] = PREFLIGHT_SECONDS,
    tolerance: Annotated[
        float, typer.Option(help="A node that reaches less than this share of the nodes' median stands out.")
    ] = PREFLIGHT_TOLERANCE,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine: one per GPU.")] = 1,
) -> None:
    """Measure this machine: matmul, disk, memory, and between ranks the network. On Slurm: slurm/preflight.sbatch.

    Exit codes: 0 nothing stands out, 3 nodes to exclude, 1 it could not be measured.
    """
    from dist_transformer.processes.launching import num_ranks_given, start_local_ranks

    if not 0 < tolerance <= 1:
        raise UserError(f"--tolerance: expected a share above 0 and at most 1, got {tolerance:g}; give another")
    if num_ranks_given():
        end = time.monotonic() + seconds
        from dist_transformer.preflight.benchmarks import limit_own_time, measure

        limit_own_time(seconds)
        code = measure(folder, run_folder or folder, end)
        sys.stdout.flush()
        os._exit(code)  # destroying a failed group could wait for ranks that never join
    from dist_transformer.preflight.report import begin_anew, main

    begin_anew(folder)
    arguments = ["--folder", str(folder), "--run-folder", str(run_folder or folder), "--seconds", str(seconds)]
    start_local_ranks(arguments, ranks, program=[sys.executable, "-m", "dist_transformer", "preflight"])
    sys.exit(main([str(folder), str(tolerance)]))
