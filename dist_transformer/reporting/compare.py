"""Comparison of several runs: differing settings, scores, curves and translations side by side.

Only scores that were measured alike are ranked.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.config import metrics
from dist_transformer.config.metrics import corpus_and_measure, is_lower_better, settings_of_measure
from dist_transformer.decoding.metrics import bleu_p_values
from dist_transformer.format import duration
from dist_transformer.reporting import formatting
from dist_transformer.reporting.charts import Marks, compared_panels
from dist_transformer.reporting.formatting import NOTHING, measure_text, number
from dist_transformer.reporting.html import render
from dist_transformer.reporting.page import charts
from dist_transformer.reporting.run_history import PLACES, PreparedCorpus, Record, RunStory
from dist_transformer.reporting.samples import FixedSentence, fixed_sentences
from dist_transformer.run.evaluations import OF_TEXTS, search_of
from dist_transformer.run.goodput import goodput_text

Named = tuple[str, RunStory]
OF_SAMPLES = ("data.validation.", "data.more_validation.", "data.filters.", "validation.max_sentences")
"""Settings that determine the fixed sentences."""
MOST_LINES = 20_000
"""Lines of the longest test set whose p-values are computed: sacreBLEU's samples take 50 kB of memory a line."""
MOST_SENTENCES = 8
"""Fixed sentences that are shown side by side."""
OF_TOKENS = ("tokenizer.type", "tokenizer.vocabulary_size", "tokenizer.shared", "tokenizer.source_model")
"""Settings of the pieces over which loss, nll, perplexity and token accuracy are averaged."""
OF_EVALUATION = ("source_sha256", "reference_sha256", "pairs")
"""Entries of the files in evaluation/ that must be equal, besides the search."""


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
    now, speeds = time.time(), [story.median_speed for _, story in stories]
    rows = [
        Row("state", [formatting.state_text(story, now) for _, story in stories]),
        Row("step", [formatting.steps_text(story) for _, story in stories]),
        Row("time in training", [duration(story.trained_seconds) for _, story in stories]),
        Row("goodput", [goodput_text(story.goodput) if story.goodput else NOTHING for _, story in stories]),
        Row("target tokens/s, median", [number(speed) for speed in speeds], _best(speeds, True)),
        Row("starts", [number(len(story.starts) or story.run.get("starts")) for _, story in stories]),
    ]
    return [*rows, *_score_rows(stories), *_evaluation_rows(stories)]


def setting_rows(stories: Sequence[Named]) -> list[Row]:
    """The settings that are not the same in all runs, then prepared corpora, former settings and divergences, if they differ."""
    changed = {key for _, story in stories for key in story.differing_settings}
    prepared = [_prepared_text(story.prepared) for _, story in stories]
    changed |= {"data.root"} if len({*prepared}) > 1 else set()
    keys = dict.fromkeys(key for _, story in stories for key in story.settings if key in changed)
    rows = [Row(key, [formatting.setting_text(story.settings.get(key)) for _, story in stories]) for key in keys]
    rows += [Row("prepared corpus", prepared), Row("changed in training", [_changed_text(each) for _, each in stories])]
    diverged = [[f"step {number(each.get('since_step'))}" for each in story.view.divergences] for _, story in stories]
    rows.append(Row("divergences", [", ".join(steps) or NOTHING for steps in diverged]))
    return [row for row in rows if len(set(row.texts)) > 1]


def _prepared_text(prepared: PreparedCorpus | None) -> str:
    if prepared is None or not prepared.digest:
        return NOTHING
    corpora = [each for each in prepared.report.get("corpora", {}).values() if isinstance(each, dict)]
    pairs = sum(rows for each in corpora if each.get("training") and isinstance(rows := each.get("rows"), int))
    return f"{prepared.digest[:12]} ({pairs:,} pairs)"


def _changed_text(story: RunStory) -> str:
    """The former values of settings, and until when they held: "schedule.name constant until step 10"."""
    said = [
        f"{key} {formatting.setting_text(values[0])} until step {number(each.get('step'))}"
        for each in story.changes for key, values in each["settings"].items()
        if not key.startswith(("tracking.", "slurm.", "training.max_steps", *PLACES)) and isinstance(values, list) and values
    ]  # fmt: skip
    return ", ".join(said) or NOTHING


def compare_page(stories: Sequence[Named], results: Sequence[Row]) -> str:
    """The page as HTML in one file; `results` are those of `result_rows`."""
    last_step = max(story.curves.last_step for _, story in stories)
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
        if measure in ("loss", "nll", *metrics.TRANSLATION_MEASURES):
            last = [curve.last if curve else None for curve in curves]
            texts = [measure_text(measure, value) for value in last]
            yield _scored(f"{formatting.metric_name(measure)}, last", texts, _best(last, highest), why)
        found = [story.best_of(measure) for _, story in stories]
        texts = [f"{measure_text(measure, each[1])} (step {each[0]:,})" if each else NOTHING for each in found]
        best = _best([each[1] if each else None for each in found], highest)
        yield _scored(f"{formatting.metric_name(measure)}, best", texts, best, why)


def _scored(name: str, texts: list[str], best: int | None, why: Sequence[str]) -> Row:
    """A row of scores, without a best one if they were not measured alike."""
    if best is None or not why:
        return Row(name, texts, best)
    return Row(name, texts, note=f"the runs differ in {', '.join(why)}")


def _evaluation_rows(stories: Sequence[Named]) -> Iterator[Row]:
    """Yields the results of `evaluate`, with their conditions in the row's name or, if these differ, beside each."""
    for name in dict.fromkeys(name for _, story in stories for name in story.evaluations):
        for key in metrics.TRANSLATION_MEASURES:
            scores = [story.evaluations.get(name, {}) for _, story in stories]
            known = [each for each in scores if key in each]
            if not known:
                continue
            having = [story for (_, story), each in zip(stories, scores, strict=True) if key in each]
            values, hows = [each.get(key) for each in scores], {formatting.evaluation_text(each) for each in known}
            of_all = hows.pop() if len(hows) == 1 else ""
            title = f"evaluated: {name} {formatting.measure_name(key)} {of_all}".strip()
            texts = [
                "of an earlier model" if name in story.outdated
                else f"{measure_text(key, each.get(key))} {'' if of_all else formatting.evaluation_text(each)}".strip()
                for (_, story), each in zip(stories, scores, strict=True)
            ]  # fmt: skip
            yield _scored(title, texts, _best(values, True), why_evaluated_otherwise(having, known, name, key))
        yield from _significance(stories, name)


def _significance(stories: Sequence[Named], name: str) -> Iterator[Row]:
    """Yields p-values of the BLEU of runs scored alike, against the first whose translations and references are there."""
    scores = [story.evaluations.get(name, {}) for _, story in stories]
    texts = [_kept_texts(story.run_dir.evaluation, name, s) for (_, story), s in zip(stories, scores, strict=True)]
    hows = [(text[1:], search_of(s), s.get("bleu_signature")) for text, s in zip(texts, scores, strict=True)]
    base = next((place for place, text in enumerate(texts) if text), 0)
    alike = {place: text[0] for place, text in enumerate(texts) if text and hows[place] == hows[base]}
    if len(alike) > 1 and len(alike[base]) <= MOST_LINES:
        baseline, story = stories[base]
        language = str(scores[base].get("target_language", story.languages[1] or ""))
        found = dict(zip(alike, bleu_p_values([*alike.values()], texts[base][1:], language), strict=True))
        cells = [NOTHING if (p := found.get(place)) is None else f"{p:.3f}" for place in range(len(stories))]
        yield Row(f"evaluated: {name} BLEU, p against {baseline} (paired bootstrap)", cells)


def _kept_texts(folder: Path, name: str, scores: Record) -> list[list[str]]:
    """The translations and the references that `evaluate` kept, by line; empty: not there, or not those of the scores."""
    references = takewhile(Path.is_file, (folder / f"{name}.reference{number}" for number in count(1)))
    try:
        texts = [file.read_bytes() for file in (folder / f"{name}.translations", *references)]
        lines = [text.decode("utf-8").split("\n")[:-1] for text in texts]
    except (OSError, UnicodeDecodeError):
        return []
    digest = sha256(b"".join(texts)).hexdigest()
    fits = scores.get(OF_TEXTS, digest) == digest and len(lines) > 1 and lines[0] and len({*map(len, lines)}) == 1
    return lines if scores and fits else []


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
    order = [*metrics.MEASURES]
    known = [name for name in names if name.rpartition("/")[2] in order]
    return sorted(known, key=lambda name: (name.rpartition("/")[0], order.index(name.rpartition("/")[2])))


def _best(values: Sequence[Any], highest: bool) -> int | None:
    """Index of the best value; None if all are equal, or fewer than two are known."""
    known = [(value, run) for run, value in enumerate(values) if isinstance(value, int | float) and np.isfinite(value)]
    if len({value for value, _ in known}) < 2:
        return None
    return max(known)[1] if highest else min(known)[1]


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


def differences(stories: Sequence[RunStory], keys: Iterable[str]) -> list[str]:
    """Settings that begin with one of `keys` and are not the same in all runs, in order."""
    wanted = tuple(keys)
    settings = [story.differing_settings.items() for story in stories]
    found = [{key: value for key, (value, _) in each if key.startswith(wanted)} for each in settings]
    every = dict.fromkeys(key for each in found for key in each)
    return [key for key in every if any(each.get(key) != found[0].get(key) for each in found)]


def why_not_alike(stories: Sequence[RunStory], measure: str) -> list[str]:
    """Settings by which a measure of validation differs between runs; empty: it may be compared."""
    corpus, key = corpus_and_measure(measure)
    found = _other_text(stories, f"data.more_validation.{corpus}" if corpus else "data.validation")
    if key in metrics.TRANSLATION_MEASURES:
        known = {str(story.curves.newest.get("validation", {}).get(f"{measure}_signature")) for story in stories}
        found += [f"{measure}_signature"] if len(known - {"None"}) > 1 else []
        return found + differences(stories, settings_of_measure(key))
    pieces = [story.prepared.pieces for story in stories if story.prepared and story.prepared.pieces]
    if pieces and len(pieces) == len(stories):
        found += ["the pieces of the tokenizer"] if len(set(pieces)) > 1 else []
    else:
        found += differences(stories, OF_TOKENS)
    return found + differences(stories, ["data.filters.", *settings_of_measure(key)])


def why_evaluated_otherwise(stories: Sequence[RunStory], scores: Sequence[Record], name: str, key: str) -> list[str]:
    """Settings by which results of `evaluate`, none of them empty, differ between runs under this name."""
    keys = (*OF_EVALUATION, f"{key}_signature")
    known = [{**{key: each.get(key) for key in keys}, **search_of(each)} for each in scores]
    found = [key for key, value in known[0].items() if any(each.get(key, value) != value for each in known)]
    if all("source_sha256" in each for each in scores):
        return found
    of_split = f"data.{name}" if name in ("test", "validation") else f"data.more_validation.{name}"
    return found or _other_text(stories, of_split)  # from a version that did not record what it scored


def _other_text(stories: Sequence[RunStory], corpus: str) -> list[str]:
    """Settings by which `corpus` is another text in other runs; prepared corpora record their text."""
    known = [story.prepared.validation for story in stories if story.prepared and story.prepared.validation]
    if corpus == "data.validation" and len(known) == len(stories):
        return [f"{corpus} (its text)"] if any(each != known[0] for each in known) else []
    places = [
        [os.path.join(str(story.settings.get("data.root") or ""), str(story.settings.get(f"{corpus}.{side}")))
         for side in ("source", "target", "path") if story.settings.get(f"{corpus}.{side}")]
        for story in stories
    ]  # fmt: skip
    found = differences(stories, [f"{corpus}.", "data.normalization"])
    return found or (["data.root"] if any(each != places[0] for each in places) else [])
