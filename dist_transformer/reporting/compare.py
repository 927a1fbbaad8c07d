"""Several runs side by side: what differs in their settings, their scores, their curves, their translations."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_transformer.config.measures import is_lower_better
from dist_transformer.durations import duration
from dist_transformer.reporting.markup import Content, Html, document, table, tag, together
from dist_transformer.reporting.page import MEASURES, footer, pictures
from dist_transformer.reporting.panels import Marks, compared_panels
from dist_transformer.reporting.reading import RunStory, settings_that_differ
from dist_transformer.reporting.samples import fixed_sentences, languages, words
from dist_transformer.reporting.words import (
    NOTHING,
    measure_name,
    measure_text,
    number,
    setting_text,
    state_text,
    steps_text,
)

Named = tuple[str, RunStory]
MOST_SENTENCES = 8
"""Fixed sentences that are shown side by side."""


@dataclass(frozen=True)
class Row:
    """A line of the comparison: what it is about, and a text for each run; `best`: the run that is best in it."""

    name: str
    texts: list[str]
    best: int | None = None


def named(stories: Sequence[RunStory]) -> list[Named]:
    """Each run under the name of its folder; with those above it, where two have the same."""
    names, depth = [story.name for story in stories], 1
    while max(Counter(names).values()) > 1 and depth < 8:
        depth += 1
        names = ["/".join(story.run_dir.path.absolute().parts[-depth:]) for story in stories]
    return [*zip(names, stories, strict=True)]


def result_rows(stories: Sequence[Named]) -> list[Row]:
    """How far the runs are, how fast they are, and their scores: last, best, of the final model."""
    now = time.time()
    rows = [
        Row("state", [state_text(story, now) for _, story in stories]),
        Row("step", [steps_text(story) for _, story in stories]),
        Row("time in training", [duration(story.trained_seconds) for _, story in stories]),
        _highest("target tokens/s, median", [_median_speed(story) for _, story in stories]),
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
    """The page as HTML, in one file."""
    names = [name for name, _ in stories]
    settings = setting_rows(stories)
    parts = [
        ("results", "Results", _table(names, result_rows(stories))),
        ("settings", "Settings that differ", _table(names, settings) if settings else tag("p", "None.")),
        ("curves", "Curves", _curves(stories)),
        ("samples", "Samples", _samples(stories)),
    ]
    folders = [tag("li", name, ": ", tag("code", str(story.run_dir.path.absolute()))) for name, story in stories]
    return document(f"{len(stories)} runs compared", tag("ul", *folders), parts, footer(time.time()))


def _score_rows(stories: Sequence[Named]) -> Iterator[Row]:
    for measure in _measures(stories):
        curves = [story.curves.of("validation", measure) for _, story in stories]
        name, highest = measure_name(measure), not is_lower_better(measure)
        if measure.startswith(("loss", "bleu", "chrf", "comet")):
            last = [curve.last if curve else None for curve in curves]
            yield Row(
                f"validation {name}, last", [measure_text(measure, value) for value in last], _best(last, highest)
            )
        found = [curve.best(measure) if curve else None for curve in curves]
        texts = [f"{measure_text(measure, each[1])} (step {each[0]:,})" if each else NOTHING for each in found]
        yield Row(f"validation {name}, best", texts, _best([each[1] if each else None for each in found], highest))


def _evaluation_rows(stories: Sequence[Named]) -> Iterator[Row]:
    names = dict.fromkeys(name for _, story in stories for name in story.evaluations)
    for name in names:
        for key in ("bleu", "chrf"):
            values = [story.evaluations.get(name, {}).get(key) for _, story in stories]
            yield Row(
                f"{name} {measure_name(key)}", [measure_text(key, value) for value in values], _best(values, True)
            )


def _measures(stories: Sequence[Named]) -> list[str]:
    """Those that any run has: of data.validation first, then of further corpora."""
    names = dict.fromkeys(name for _, story in stories for name in story.curves.names("validation"))
    known = [name for name in names if name.rpartition("/")[2] in MEASURES]
    return sorted(
        known, key=lambda name: (name.count("/"), name.rpartition("/")[0], MEASURES.index(name.rpartition("/")[2]))
    )


def _best(values: Sequence[Any], highest: bool) -> int | None:
    """Which is best; None where they are all the same, or fewer than two are known."""
    known = [
        (value, place) for place, value in enumerate(values) if isinstance(value, int | float) and np.isfinite(value)
    ]
    if len({value for value, _ in known}) < 2:
        return None
    return max(known)[1] if highest else min(known)[1]


def _highest(name: str, values: Sequence[float | None]) -> Row:
    return Row(name, [number(value) for value in values], _best(values, True))


def _median_speed(story: RunStory) -> float | None:
    curve = story.curves.of("train", "tokens_per_second")
    return float(np.median(curve.values)) if curve else None


def _table(names: Sequence[str], rows: Sequence[Row]) -> Html:
    cells: list[list[Content]] = [
        [row.name, *(tag("strong", text) if place == row.best else text for place, text in enumerate(row.texts))]
        for row in rows
    ]
    return table(["", *names], cells)


def _curves(stories: Sequence[Named]) -> Html:
    panels = compared_panels(stories)
    last_step = max(story.curves.last_step for _, story in stories)
    return pictures(panels, Marks(last_step)) if panels else tag("p", "No step was recorded yet.")


def _samples(stories: Sequence[Named]) -> Html:
    """The newest translation of each fixed sentence by each run."""
    by_run = {name: {(each.corpus, each.source): each for each in fixed_sentences(story)} for name, story in stories}
    keys = [*dict.fromkeys(key for sentences in by_run.values() for key in sentences)][:MOST_SENTENCES]
    source, target = languages(stories[0][1])
    parts = []
    for key in keys:
        having = {name: sentences[key] for name, sentences in by_run.items() if key in sentences}
        rows = [
            [name, f"{each.translations[-1][0]:,}", words(each.translations[-1][1], target)]
            for name, each in having.items()
        ]
        reference = next(iter(having.values())).reference
        rows.append(["reference", "", words(reference, target)])
        parts += [tag("h3", words(key[1], source)), table(["run", "step", "translation"], rows)]
    return together(parts) or tag("p", "No run has written translations of fixed sentences.")
