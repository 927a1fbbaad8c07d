"""The report of one run: its page and its figures, with attention maps of the newest model."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.errors import UserError
from dist_transformer.files import replacing
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import write_output, writing

if TYPE_CHECKING:  # imported at run time only for drawing
    from dist_transformer.reporting.attention import SentenceAttention
    from dist_transformer.reporting.run_history import RunStory


log = logging.getLogger(__name__)


MOST_SENTENCES = 3
"""Sentences whose attention is drawn."""


LONGEST_CHARACTERS = 160
"""Length limit of a sentence chosen for its attention: a longer one has more pieces than a figure can label."""


LARGEST_AT_END_BYTES = 200_000_000
"""Size limit of metrics.jsonl for a report at the end of a run, while all ranks and GPUs wait: 240 MB took 12 s."""


def report_after_training(run_dir: RunDir) -> bool:
    """Writes figures and page at the end of a run (rank 0); returns True if they were written.

    A failure is a warning: the run is over and saved. A history that takes long to read is left to the user.
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
    """Writes the page about a run, and without `output` its figures too; returns the path of the page.

    Args:
        output: default: report.html in the run folder.
        sentences: sentences whose attention is drawn; None: fixed samples.

    Raises:
        UserError: the page cannot be written, or `sentences` are given and there is no model to translate them.
    """
    from dist_transformer.reporting.attention import attention_png
    from dist_transformer.reporting.page import run_page
    from dist_transformer.reporting.run_history import read_story

    story = read_story(run_dir)
    maps, note = _attention(story, sentences) if with_attention else ([], "Left out with --no-attention.")
    attention = [(sentence, attention_png(sentence)) for sentence in maps]
    page = run_page(story, attention, note)
    if output is None:
        with writing(run_dir.figures):
            write_figures(story, [data for _, data in attention])
    write_output(output or run_dir.report, page)
    return output or run_dir.report


def write_figures(story: "RunStory", attention: Sequence[bytes]) -> None:
    """Writes the figures of a run: curves.png, attention_1.png ..., lengths.png. Older ones are replaced."""
    from dist_transformer.reporting.charts import marks_of, panels_of
    from dist_transformer.reporting.figures import curves_png

    folder = story.run_dir.figures
    folder.mkdir(exist_ok=True)
    if panels := panels_of(story):
        curves_png(panels, marks_of(story), folder / "curves.png", story.name)
    pictures = {f"attention_{number}.png": data for number, data in enumerate(attention, start=1)}
    if story.prepared and story.prepared.picture:
        pictures["lengths.png"] = story.prepared.picture
    for name, data in pictures.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(data)


def _attention(story: "RunStory", sentences: Sequence[str] | None) -> tuple[list["SentenceAttention"], str]:
    """The maps of chosen sentences, or the reason why there are none."""
    from dist_transformer.reporting.samples import fixed_sentences

    sources = dict.fromkeys(sentence.source for sentence in fixed_sentences(story))
    fitting = [source for source in sources if 0 < len(source.strip()) <= LONGEST_CHARACTERS]
    chosen = fitting[:MOST_SENTENCES] if sentences is None else list(sentences)
    if not chosen:
        return [], "No fixed sample sentences to draw the attention of; give some with --sentences."
    if sentences is None and not story.run_dir.model.is_dir():
        return [], "Not drawn: the run has not written its model yet, which it does at its end."
    try:
        from dist_transformer.decoding.loaded_model import model_folder_of  # imports torch, as the maps do
        from dist_transformer.reporting.attention_maps import attention_of

        return attention_of(model_folder_of(story.run_dir.path), chosen), ""
    except UserError as error:
        if sentences is not None:
            raise
        return [], f"Not drawn: {error}"
