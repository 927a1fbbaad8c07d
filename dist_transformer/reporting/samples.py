"""Sample translations: the fixed sentences step by step, and those drawn at the newest validations."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from dist_transformer.reporting.run_history import RunStory

MOST_STEPS = 12
"""Limit of different translations shown for a fixed sentence, including the first and the last."""
OPEN_SENTENCES = 2
"""Fixed sentences that are shown at once; the others are folded."""
NEWEST_DRAWN = 3
"""Validations whose drawn sentences are shown."""

Stretch = tuple[int, int, str]


@dataclass(frozen=True)
class FixedSentence:
    """A sentence that is translated at each validation: (step, translation), steps ascending."""

    corpus: str
    number: int
    source: str
    reference: str
    translations: list[tuple[int, str]]

    @property
    def changes(self) -> list[Stretch]:
        """(First step, last step, translation) of each series of validations with the same translation."""
        series = [[*found] for _, found in groupby(self.translations, key=itemgetter(1))]
        return [(found[0][0], found[-1][0], found[0][1]) for found in series]

    @property
    def shown(self) -> list[Stretch]:
        """At most MOST_STEPS of its `changes`, evenly spaced, including the first and the last."""
        found = self.changes
        if len(found) <= MOST_STEPS:
            return found
        return [found[round(place * (len(found) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS)]


def fixed_sentences(story: RunStory) -> list[FixedSentence]:
    """The fixed sentences of all corpora, in the order of their first appearance."""
    found: dict[tuple[str, int, str], FixedSentence] = {}
    for record in story.samples:
        corpus = str(record.get("corpus", "validation"))
        for sentence in _sentences(record, are_fixed=True):
            key = (corpus, int(sentence.get("number", 0)), str(sentence.get("source", "")))
            entry = found.setdefault(key, FixedSentence(*key, str(sentence.get("reference", "")), []))
            entry.translations.append((int(record.get("step", 0)), str(sentence.get("translation", ""))))
    return [*found.values()]


def drawn_sentences(story: RunStory) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Newly drawn sentences, each with its step, of the newest validations of each corpus that has some."""
    by_corpus: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in story.samples:
        by_corpus[str(record.get("corpus", "validation"))].append(record)
    drawn: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for corpus, records in by_corpus.items():
        for record in reversed(records[-NEWEST_DRAWN:]):
            drawn[corpus] += [(record.get("step", 0), each) for each in _sentences(record, are_fixed=False)]
    return {corpus: sentences for corpus, sentences in drawn.items() if sentences}


def _sentences(record: dict[str, Any], *, are_fixed: bool) -> list[dict[str, Any]]:
    return [each for each in record["sentences"] if isinstance(each, dict) and bool(each.get("fixed")) == are_fixed]
