"""Comparison of several runs: differing settings, scores, curves and translations side by side."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from dist_transformer.config.metrics import TRANSLATION_MEASURES, is_lower_better
from dist_transformer.format import duration
from dist_transformer.reporting.charts import Marks, compared_panels
from dist_transformer.reporting.comparable import differences, why_evaluated_otherwise, why_not_alike
from dist_transformer.reporting.formatting import (
    NOTHING,
    evaluation_text,
    measure_name,
    measure_text,
    metric_name,
    number,
    setting_text,
    state_text,
    steps_text,
)
from dist_transformer.reporting.html import render
from dist_transformer.reporting.page import charts
from dist_transformer.reporting.run_history import RunStory, settings_that_differ
from dist_transformer.reporting.samples import FixedSentence, fixed_sentences
from dist_transformer.reporting.scores import EVALUATED, MEASURES
from dist_transformer.run.goodput import goodput_text

Named = tuple[str, RunStory]
OF_SAMPLES = (
    "data.validation.",
    "data.more_validation.",
    "data.filters.",
    "validation.samples",
    "validation.max_sentences",
)
"""Settings that determine the fixed sentences."""
MOST_SENTENCES = 8
"""Fixed sentences that are shown side by side."""


@dataclass(frozen=True)
class Row:
    """A line of the comparison: its name, and a text for each run.

    Attributes:
        best: index of the best run.
        note: reason why no score is marked as best, if they were not measured alike.
    """

    name: str
    texts: list[str]
    best: int | None = None
    note: str = ""


def named(stories: Sequence[RunStory]) -> list[Named]:
    """Each run with the name of its folder, and with parent folders if two names are equal."""
    names, depth = [story.name for story in stories], 1
    while max(Counter(names).values()) > 1 and depth < 8:
        depth += 1
        names = ["/".join(story.run_dir.path.absolute().parts[-depth:]) for story in stories]
    return [*zip(names, stories, strict=True)]


def result_rows(stories: Sequence[Named]) -> list[Row]:
    """Rows of the runs' progress, speed and scores: last, best, of the final model."""
    now = time.time()
    rows = [
        Row("state", [state_text(story, now) for _, story in stories]),
        Row("step", [steps_text(story) for _, story in stories]),
        Row("time in training", [duration(story.trained_seconds) for _, story in stories]),
        Row("goodput", [goodput_text(story.goodput) if story.goodput else NOTHING for _, story in stories]),
        _highest("target tokens/s, median", [story.median_speed for _, story in stories]),
        Row("starts", [number(len(story.starts) or story.run.get("starts")) for _, story in stories]),
    ]
    return [*rows, *_score_rows(stories), *_evaluation_rows(stories)]


def setting_rows(stories: Sequence[Named]) -> list[Row]:
    """The settings that are not the same in all runs."""
    changed = {key for _, story in stories for key in settings_that_differ(story.settings)}
    keys = dict.fromkeys(key for _, story in stories for key in story.settings if key in changed)
    rows = [Row(key, [setting_text(story.settings.get(key)) for _, story in stories]) for key in keys]
    return [row for row in rows if len(set(row.texts)) > 1]


def compare_page(stories: Sequence[Named]) -> str:
    """The page as HTML in one file."""
    results, last_step = result_rows(stories), max(story.curves.last_step for _, story in stories)
    common = _common_sentences(stories)
    return render(
        "compare.html",
        title=f"{len(stories)} runs compared",
        stories=stories,
        languages=stories[0][1].languages,
        results=results,
        notes=notes(results),
        differing=setting_rows(stories),
        charts=charts(compared_panels(stories), Marks(last_step)),
        common=common,
        why_no_samples="" if common else _why_no_samples(stories),
    )


def _score_rows(stories: Sequence[Named]) -> Iterator[Row]:
    for measure in _measures(stories):
        curves = [story.curves.of("validation", measure) for _, story in stories]
        highest = not is_lower_better(measure)
        why = why_not_alike([story for (_, story), curve in zip(stories, curves, strict=True) if curve], measure)
        if measure in ("loss", "nll", *TRANSLATION_MEASURES):
            last = [curve.last if curve else None for curve in curves]
            texts = [measure_text(measure, value) for value in last]
            yield _scored(f"{metric_name(measure)}, last", texts, _best(last, highest), why)
        found = [curve.best(measure) if curve else None for curve in curves]
        texts = [f"{measure_text(measure, each[1])} (step {each[0]:,})" if each else NOTHING for each in found]
        best = _best([each[1] if each else None for each in found], highest)
        yield _scored(f"{metric_name(measure)}, best", texts, best, why)


def _scored(name: str, texts: list[str], best: int | None, why: Sequence[str]) -> Row:
    """A row of scores, without a best one if they were not measured alike."""
    if best is None or not why:
        return Row(name, texts, best)
    return Row(name, texts, note=f"the runs differ in {', '.join(why)}")


def _evaluation_rows(stories: Sequence[Named]) -> Iterator[Row]:
    """Yields the results of `evaluate`, with their conditions in the row's name or, if these differ, beside each."""
    for name, text in dict.fromkeys(
        (name, _text_of(scores)) for _, story in stories for name, scores in story.evaluations.items()
    ):
        for key in EVALUATED:
            scores = [story.evaluations.get(name, {}) for _, story in stories]
            scores = [each if _text_of(each) == text else {} for each in scores]
            known = [each for each in scores if key in each]
            having = [story for (_, story), each in zip(stories, scores, strict=True) if key in each]
            if not known:
                continue
            values, hows = [each.get(key) for each in scores], {evaluation_text(each) for each in known}
            title = f"evaluated: {_name_of(name, text, stories)} {measure_name(key)}"
            texts = [measure_text(key, value) for value in values]
            if len(hows) == 1:
                title = f"{title} {hows.pop()}".strip()
            else:
                texts = [f"{text} {evaluation_text(each)}".strip() for text, each in zip(texts, scores, strict=True)]
            yield _scored(title, texts, _best(values, True), why_evaluated_otherwise(having, known, name, key))


def _text_of(scores: Mapping[str, Any]) -> str:
    """Digest that identifies the sentences of a result; empty in results of versions that did not record it."""
    digests = f"{scores['source_sha256']} {scores.get('reference_sha256')}" if "source_sha256" in scores else ""
    return sha256(digests.encode()).hexdigest() if digests else ""


def _name_of(name: str, text: str, stories: Sequence[Named]) -> str:
    """The name of the corpus, with the beginning of its digest if other sentences have the same name."""
    texts = {_text_of(story.evaluations[name]) for _, story in stories if name in story.evaluations}
    return name if len(texts) == 1 else f"{name} [{text[:8] or 'text not known'}]"


def notes(rows: Sequence[Row]) -> list[str]:
    """Reasons why no run is marked as best in some rows, one line for each."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            names.setdefault(row.note, []).append(row.name)
    return [f"No best one is marked of {'; '.join(named)}: {note}." for note, named in names.items()]


def _measures(stories: Sequence[Named]) -> list[str]:
    """Measures that any run has: of data.validation first, then of further corpora."""
    names = dict.fromkeys(name for _, story in stories for name in story.curves.names("validation"))
    known = [name for name in names if name.rpartition("/")[2] in MEASURES]
    return sorted(
        known, key=lambda name: (name.count("/"), name.rpartition("/")[0], MEASURES.index(name.rpartition("/")[2]))
    )


def _best(values: Sequence[Any], highest: bool) -> int | None:
    """Index of the best value; None if all are equal, or fewer than two are known."""
    known = [
        (value, place) for place, value in enumerate(values) if isinstance(value, int | float) and np.isfinite(value)
    ]
    if len({value for value, _ in known}) < 2:
        return None
    return max(known)[1] if highest else min(known)[1]


def _highest(name: str, values: Sequence[float | None]) -> Row:
    return Row(name, [number(value) for value in values], _best(values, True))


def _common_sentences(stories: Sequence[Named]) -> list[tuple[str, dict[str, FixedSentence]]]:
    """The fixed sentences that at least two runs have, each with its translations by these runs."""
    by_run = {name: {(each.corpus, each.source): each for each in fixed_sentences(story)} for name, story in stories}
    num_runs = Counter(key for sentences in by_run.values() for key in sentences)
    keys = [key for key, count in num_runs.items() if count > 1][:MOST_SENTENCES]
    return [(key[1], {name: each[key] for name, each in by_run.items() if key in each}) for key in keys]


def _why_no_samples(stories: Sequence[Named]) -> str:
    without = [name for name, story in stories if not fixed_sentences(story)]
    if len(without) == len(stories):
        return "No run has written translations of fixed sentences."
    if len(without) > len(stories) - 2:
        return f"Only one run has written translations of fixed sentences; these have none: {', '.join(without)}."
    why = differences([story for name, story in stories if name not in without], OF_SAMPLES)
    said = f": the runs differ in {', '.join(why)}" if why else ""
    return f"No fixed sentence was translated by two of the runs{said}."
