"""report, compare: pages about runs, each one file that opens anywhere, and the pictures of a run."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dist_transformer.errors import UserError
from dist_transformer.outputs import check_output, write_output, writing
from dist_transformer.run_dir import RunDir, replacing

if TYPE_CHECKING:  # at run time only where something is drawn
    from dist_transformer.reporting.attention import SentenceAttention
    from dist_transformer.reporting.compare import Named, Row
    from dist_transformer.reporting.reading import RunStory

log = logging.getLogger(__name__)

Runs = Annotated[list[str], typer.Argument(help="Run folders, job ids, or the folder of a sweep.", show_default=False)]
RunOrJob = Annotated[str, typer.Argument(help="A run folder, or a job id: 123, 123_4.", show_default=False)]
Root = Annotated[Path, typer.Option(help="The folder of runs, looked through for a job that Slurm has forgotten.")]
RUNS = Path("runs")
PAGE = "a page"
MOST_SENTENCES = 3
"""Whose attention is drawn."""
LONGEST_CHARACTERS = 160
"""Of a sentence that is chosen for its attention: a longer one has more pieces than a picture can name."""
LARGEST_AT_END_BYTES = 200_000_000
"""Of metrics.jsonl, for a report at the end of a run, when all ranks and their GPUs wait for it: 240 MB took 12 s."""


def report_command(
    run: RunOrJob,
    output: Annotated[
        Path | None, typer.Option(help="Where to; default: RUN/report.html, and the pictures in RUN/figures.")
    ] = None,
    sentences: Annotated[
        Path | None, typer.Option(help="Sentences whose attention is drawn, one a line; default: fixed samples.")
    ] = None,
    no_attention: Annotated[bool, typer.Option("--no-attention", help="Do not load the model.")] = False,
    root: Root = RUNS,
) -> None:
    """Write a page about a run: its history, data, scores, samples and pictures, in one file that needs no network."""
    from dist_transformer.cluster.targets import find_target
    from dist_transformer.reporting.markup import is_own_page

    if sentences is not None and no_attention:
        raise UserError("--sentences names what --no-attention leaves out: give one of them")
    if output is not None:
        check_output(output, PAGE, is_own_page, is_file=True)
    lines = None if sentences is None else _lines(sentences)
    written = write_run_report(find_target(run, root).run_dir, output, lines, with_attention=not no_attention)
    print(f"written to {written}")


def compare_command(
    runs: Runs,
    output: Annotated[Path, typer.Option(help="Where to.")] = Path("compare.html"),
    root: Root = RUNS,
) -> None:
    """Compare runs: settings that differ, scores, curves and translations side by side."""
    from dist_transformer.reporting.compare import compare_page, named, notes, result_rows, setting_rows
    from dist_transformer.reporting.markup import is_own_page
    from dist_transformer.reporting.reading import read_story

    folders = [folder for run in runs for folder in _run_dirs(run, root)]
    if len({folder.path.resolve() for folder in folders}) < 2:
        raise UserError(f"{' '.join(runs)}: one run; expected at least two: dist-transformer compare RUN RUN ...")
    check_output(output, PAGE, is_own_page, is_file=True)
    stories = named([read_story(folder) for folder in folders])
    write_output(output, compare_page(stories))
    results = result_rows(stories)
    _print_rows(stories, [*setting_rows(stories), *results])
    for line in notes(results):
        print(line)
    print(f"written to {output}")


def report_after_training(run_dir: RunDir) -> bool:
    """Pictures and page at the end of a run (rank 0); whether they were written.

    Whatever fails is a warning: the run is over and saved. A history that takes long to read is left to people.
    """
    size = run_dir.metrics.stat().st_size if run_dir.metrics.is_file() else 0
    if size > LARGEST_AT_END_BYTES:
        megabytes, command = size / 1e6, f"dist-transformer report {run_dir.path}"
        log.info("report     not drawn now, %s has %.0f MB: %s", run_dir.metrics.name, megabytes, command)
        return False
    for with_attention in (True, False):
        try:
            write_run_report(run_dir, with_attention=with_attention)
            return True
        except Exception as error:  # noqa: BLE001  (drawing must not turn a finished run into a failed one)
            log.warning("%s was not written: %s: %s", run_dir.report, type(error).__name__, error)
    return False


def write_run_report(
    run_dir: RunDir,
    output: Path | None = None,
    sentences: Sequence[str] | None = None,
    *,
    with_attention: bool = True,
) -> Path:
    """Writes the page about a run, and without `output` its pictures too; returns where the page is.

    Args:
        output: default: report.html in the run folder.
        sentences: whose attention is drawn; None: the shortest of the fixed samples.

    Raises:
        UserError: the page cannot be written there, or `sentences` are given and there is no model to translate them.
    """
    from dist_transformer.reporting.page import drawn, run_page
    from dist_transformer.reporting.reading import read_story

    story = read_story(run_dir)
    maps, note = _attention(story, sentences) if with_attention else ([], "Left out with --no-attention.")
    attention = drawn(maps)
    page = run_page(story, attention, note)
    if output is None:
        with writing(run_dir.figures):
            write_figures(story, [data for _, data in attention])
    write_output(output or run_dir.report, page)
    return output or run_dir.report


def write_figures(story: "RunStory", attention: Sequence[bytes]) -> None:
    """The pictures of a run as files: curves.png, attention_1.png ..., lengths.png. Older ones are replaced."""
    from dist_transformer.reporting.figures import curves_png
    from dist_transformer.reporting.panels import marks_of, panels_of

    folder = story.run_dir.figures
    folder.mkdir(exist_ok=True)
    if panels := panels_of(story):
        curves_png(panels, marks_of(story), folder / "curves.png", story.name)
    for number, data in enumerate(attention, start=1):
        _write_bytes(folder / f"attention_{number}.png", data)
    if story.prepared and story.prepared.picture:
        _write_bytes(folder / "lengths.png", story.prepared.picture)


def _attention(story: "RunStory", sentences: Sequence[str] | None) -> tuple[list["SentenceAttention"], str]:
    """The maps of chosen sentences, or why there are none."""
    if sentences is not None:
        return _maps(story.run_dir, list(sentences)), ""
    chosen = _chosen(story)
    if not chosen:
        return [], "No fixed sample sentences to draw the attention of; give some with --sentences."
    if not story.run_dir.model.is_dir():
        return [], "Not drawn: the run has not written its model yet, which it does at its end."
    try:
        return _maps(story.run_dir, chosen), ""
    except UserError as error:
        return [], f"Not drawn: {error}"


def _maps(run_dir: RunDir, sentences: list[str]) -> list["SentenceAttention"]:
    from dist_transformer.cli.attention_maps import attention_of  # imports torch
    from dist_transformer.cli.loaded_model import model_folder_of

    return attention_of(model_folder_of(run_dir.path), sentences)


def _chosen(story: "RunStory") -> list[str]:
    """Fixed samples that a picture can show: the first ones that are not too long."""
    from dist_transformer.reporting.samples import fixed_sentences

    sources = dict.fromkeys(sentence.source for sentence in fixed_sentences(story))
    return [source for source in sources if 0 < len(source.strip()) <= LONGEST_CHARACTERS][:MOST_SENTENCES]


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]  # at U+2028 no line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a text file in UTF-8, one sentence a line: {error}") from None
    if not any(lines):
        raise UserError(f"{path}: holds no sentence; expected one a line")
    return [line for line in lines if line]


def _run_dirs(text: str, root: Path) -> list[RunDir]:
    """The run that is meant; of a sweep's folder those of its points that have begun."""
    from dist_transformer.cluster.targets import find_target, is_run_folder, num_points

    folder = Path(text)
    if not folder.is_dir() or num_points(folder) is None:
        return [find_target(text, root).run_dir]
    points = sorted(folder.glob("task_*"), key=lambda path: (len(path.name), path.name))
    return [RunDir(point.absolute()) for point in points if is_run_folder(point)]


def _write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _print_rows(stories: Sequence["Named"], rows: Sequence["Row"]) -> None:
    """A table on a terminal, lines with tabs elsewhere."""
    names = [name for name, _ in stories]
    if not sys.stdout.isatty():
        for line in [["", *names], *([row.name, *row.texts] for row in rows)]:
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in names:
        table.add_column(Text(name))
    for row in rows:
        cells = [Text(text, style="bold" if place == row.best else "") for place, text in enumerate(row.texts)]
        table.add_row(Text(row.name), *cells)
    Console().print(table)
