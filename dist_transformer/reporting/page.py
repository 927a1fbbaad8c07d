"""The page about one run: one file with its history, data, scores, samples and figures (templates/run.html).

It loads nothing, needs no script, and is made for phones, print and dark mode.
"""

from collections.abc import Sequence

from dist_transformer.config.metrics import TRANSLATION_MEASURES
from dist_transformer.reporting.charts import Marks, Panel, marks_of, panels_of
from dist_transformer.reporting.figures import panel_svg
from dist_transformer.reporting.html import render
from dist_transformer.reporting.run_history import CHECKPOINT_MEASURES, RunStory, settings_that_differ
from dist_transformer.reporting.samples import OPEN_SENTENCES, drawn_sentences, fixed_sentences
from dist_transformer.reporting.scores import signatures, validations
from dist_transformer.run.goodput import rows_of


def run_page(story: RunStory) -> str:
    """The page as HTML."""
    marks = marks_of(story)
    return render(
        "run.html",
        title=story.name,
        story=story,
        languages=story.languages,
        EVALUATED=TRANSLATION_MEASURES,
        validations=validations(story),
        signatures=signatures(story),
        charts=charts(panels_of(story), marks),
        marks=marks,
        fixed=fixed_sentences(story),
        OPEN_SENTENCES=OPEN_SENTENCES,
        drawn=drawn_sentences(story),
        goodput_rows=rows_of(story.goodput) if story.goodput else (),
        CHECKPOINT_MEASURES=CHECKPOINT_MEASURES,
        differing=settings_that_differ(story.settings),
    )


def charts(panels: Sequence[Panel], marks: Marks) -> list[tuple[str, str]]:
    """Title and <svg> element of each panel."""
    return [(panel.title, panel_svg(panel, marks)) for panel in panels]
