"""report, compare: pages about runs, each a single file."""

from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import RUNS, Root, RunOrJob
from dist_transformer.errors import UserError
from dist_transformer.format import print_table
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import check_output, write_output

Runs = Annotated[list[str], typer.Argument(help="Run folders, job ids, or a folder of runs.")]


def report_command(
    run: RunOrJob,
    output: Annotated[Path | None, typer.Option(help="Where to; default: RUN/report.html.")] = None,
    root: Root = RUNS,
) -> None:
    """Write a page about a run: its history, data, scores, samples and pictures, in one file that needs no network."""
    from dist_transformer.cluster.run_ref import find_run
    from dist_transformer.reporting.html import is_own_page
    from dist_transformer.reporting.page import write_run_report

    if output is not None:
        check_output(output, "a page", is_own_page, is_file=True)
    print(f"written to {write_run_report(find_run(run, root).run_dir, output)}")


def compare_command(
    runs: Runs, output: Annotated[Path, typer.Option(help="Where to.")] = Path("compare.html"), root: Root = RUNS
) -> None:
    """Compare runs: settings that differ, scores, curves and translations side by side."""
    from dist_transformer.reporting.compare import compare_page, named, notes, result_rows, setting_rows
    from dist_transformer.reporting.html import is_own_page
    from dist_transformer.reporting.run_history import read_story

    folders = [folder for run in runs for folder in _run_dirs(run, root)]
    if len({folder.path.resolve() for folder in folders}) < 2:
        raise UserError(f"{' '.join(runs)}: one run; expected at least two: dist-transformer compare RUN RUN ...")
    check_output(output, "a page", is_own_page, is_file=True)
    stories = named([read_story(folder) for folder in folders])
    results = result_rows(stories)
    write_output(output, compare_page(stories, results))
    rows = [*setting_rows(stories), *results]
    best = [None if row.best is None else row.best + 1 for row in rows]
    print_table(["", *(name for name, _ in stories)], [[row.name, *row.texts] for row in rows], best)
    for line in notes(results):
        print(line)
    print(f"written to {output}")


def _run_dirs(text: str, root: Path) -> list[RunDir]:
    """The named run, or the runs of a folder of runs."""
    from dist_transformer.cluster.job_status import run_folders
    from dist_transformer.cluster.run_ref import find_run, is_run_folder

    folder = Path(text)
    folders = run_folders(folder) if folder.is_dir() and not is_run_folder(folder) else []
    return [RunDir(each.absolute()) for each in folders] or [find_run(text, root).run_dir]
