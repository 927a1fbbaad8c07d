"""The page about one run: one file with its history, data, scores, samples and figures (templates/run.html).

It loads nothing, needs no script, and is made for phones, print and dark mode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.metrics import MEASURES, TOKEN_MEASURES, TRANSLATION_MEASURES, corpus_and_measure
from dist_transformer.reporting.charts import Marks, Panel, marks_of, panels_of
from dist_transformer.reporting.figures import panel_svg
from dist_transformer.reporting.formatting import measure_name, measure_text, number
from dist_transformer.reporting.html import render
from dist_transformer.reporting.run_history import CHECKPOINT_MEASURES, RunStory, read_story
from dist_transformer.reporting.samples import OPEN_SENTENCES, drawn_sentences, fixed_sentences
from dist_transformer.run.evaluations import search_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import rows_of
from dist_transformer.run.outputs import write_output


def write_run_report(run_dir: RunDir, output: Path | None = None) -> Path:
    """Writes the page about a run, by default report.html in its folder, and returns its path. Raises UserError: the
    page cannot be written."""
    write_output(output or run_dir.report, run_page(read_story(run_dir)))
    return output or run_dir.report


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
        differing=story.differing_settings,
    )


def charts(panels: Sequence[Panel], marks: Marks) -> list[tuple[str, str]]:
    """Title and <svg> element of each panel."""
    return [(panel.title, panel_svg(panel, marks)) for panel in panels]


@dataclass(frozen=True)
class Validations:
    """All validations of a corpus ("": data.validation) as a table. `best`: row of the best one, if validation.metric
    is of this corpus."""

    corpus: str
    remarks: list[str]
    head: list[str]
    rows: list[list[str]]
    best: int | None


def validations(story: RunStory) -> list[Validations]:
    """The validations of each corpus, step by step."""
    return [_of_corpus(story, prefix) for prefix in _prefixes(story)]


def _prefixes(story: RunStory) -> list[str]:
    """The prefixes of the measures: "" for data.validation, "newstest2013/" for a further one."""
    names = story.curves.names("validation")
    return [*dict.fromkeys(name[: name.rfind("/") + 1] for name in names if name.endswith(tuple(MEASURES)))]


def _of_corpus(story: RunStory, prefix: str) -> Validations:
    curves = {key: curve for key in MEASURES if (curve := story.curves.of("validation", prefix + key)) is not None}
    by_step = {key: dict(zip(each.steps.tolist(), each.values.tolist(), strict=True)) for key, each in curves.items()}
    steps = sorted({step for values in by_step.values() for step in values})
    rows = [[number(step), *(measure_text(key, by_step[key].get(step)) for key in curves)] for step in steps]
    best, corpus = story.best, prefix.rstrip("/")
    if best is not None and corpus_and_measure(best.measure)[0] != (corpus or None):
        best = None
    said = [f"Best by {measure_name(corpus_and_measure(best.measure)[1])}: step {best.step:,}."] if best else []
    row = steps.index(best.step) if best is not None and best.step in steps else None
    head = ["step", *map(measure_name, curves)]
    return Validations(corpus, [*said, *_measured_on(story, corpus, list(curves))], head, rows, row)


def _measured_on(story: RunStory, corpus: str, measures: list[str]) -> Iterator[str]:
    translated = [key for key in measures if key in TRANSLATION_MEASURES]
    if translated and (search := search_text({"beam_size": story.settings.get("validation.beam_size")})):
        most = story.settings.get("validation.max_sentences")
        # Pairs as prepared; those of further corpora are not counted there.
        corpora = story.prepared.report.get("corpora", {}) if story.prepared and not corpus else {}
        rows = corpora.get("validation", {}).get("rows")
        is_part = isinstance(most, int) and (not isinstance(rows, int) or most < rows)
        sentences = f"of the first {most:,} sentences" if is_part else "of all sentences"
        yield f"{_listed(translated)}: {search}, {sentences} (validation.beam_size, max_sentences)."
    of_tokens = [key for key in measures if key in TOKEN_MEASURES]
    if of_tokens:
        smoothed = "; the loss is that of smoothed labels" if "loss" in of_tokens else ""
        yield f"{_listed(of_tokens)}: of the references of the whole corpus{smoothed}."


def _listed(measures: Sequence[str]) -> str:
    names = [measure_name(measure) for measure in measures]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def signatures(story: RunStory) -> list[tuple[str, str]]:
    """Name and signature of each score, with its corpora unless all have the same."""
    newest = story.curves.newest.get("validation", {})
    found: list[tuple[str, str, Any]] = [(each.rstrip("/") or "validation", each, newest) for each in _prefixes(story)]
    found += [(f"evaluated: {name}", "", scores) for name, scores in story.evaluations.items()]
    lines = []
    for key in ("bleu", "chrf"):
        of_corpora: dict[str, list[str]] = {}
        for name, prefix, record in found:
            if signature := record.get(f"{prefix}{key}_signature"):
                of_corpora.setdefault(str(signature), []).append(name)
        for signature, names in of_corpora.items():
            where = f" ({', '.join(names)})" if len(of_corpora) > 1 else ""
            lines.append((f"{measure_name(key)}{where}", signature))
    return lines
