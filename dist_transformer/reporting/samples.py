"""Sample translations as tables: the fixed sentences step by step, and those drawn at the newest validations."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dist_transformer.reporting.html import Html, details, table, tag, together
from dist_transformer.reporting.run_history import RunStory

MOST_STEPS = 12
"""Limit of different translations shown for a fixed sentence, including the first and the last."""
OPEN_SENTENCES = 2
"""Fixed sentences that are shown at once; the others are folded."""
NEWEST_DRAWN = 3
"""Validations whose drawn sentences are shown."""


@dataclass(frozen=True)
class FixedSentence:
    """A sentence that is translated at each validation: (step, translation), steps ascending."""

    corpus: str
    number: int
    source: str
    reference: str
    translations: list[tuple[int, str]]


def fixed_sentences(story: RunStory) -> list[FixedSentence]:
    """The fixed sentences of all corpora, in the order of their first appearance."""
    found: dict[tuple[str, int, str], FixedSentence] = {}
    for record in story.samples:
        corpus = str(record.get("corpus", "validation"))
        for sentence in _sentences(record):
            if not sentence.get("fixed"):
                continue
            key = (corpus, int(sentence.get("number", 0)), str(sentence.get("source", "")))
            entry = found.setdefault(key, FixedSentence(*key, str(sentence.get("reference", "")), []))
            entry.translations.append((int(record.get("step", 0)), str(sentence.get("translation", ""))))
    return [*found.values()]


def changes(translations: Sequence[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Tuples (first step, last step, translation), one for each series of validations with the same translation."""
    stretches: list[tuple[int, int, str]] = []
    for step, translation in translations:
        if stretches and stretches[-1][2] == translation:
            stretches[-1] = (stretches[-1][0], step, translation)
        else:
            stretches.append((step, step, translation))
    return stretches


def samples_part(story: RunStory) -> Html:
    """The section of sample translations of a page."""
    fixed = [_step_by_step(sentence, story) for sentence in fixed_sentences(story)]
    more = fixed[OPEN_SENTENCES:]
    folded = [details(f"{len(more)} more of the fixed sentences", *more)] if more else []
    parts = [*fixed[:OPEN_SENTENCES], *folded, *_newest_drawn(story)]
    return together(parts) or tag("p", "No sample translations were written.")


def _sentences(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [sentence for sentence in record["sentences"] if isinstance(sentence, dict)]


def _step_by_step(sentence: FixedSentence, story: RunStory) -> Html:
    source, target = languages(story)
    stretches = changes(sentence.translations)
    shown = _spread(stretches, MOST_STEPS)
    rows = [[_steps(first, last), words(text, target)] for first, last, text in reversed(shown)]
    rows += [["reference", words(sentence.reference, target)]]
    left_out = f"; {len(shown)} of {len(stretches)} different ones" if len(shown) < len(stretches) else ""
    caption = f"{sentence.corpus}, sentence {sentence.number}: translations by step, the newest first{left_out}"
    return together([tag("h3", words(sentence.source, source)), table(["step", "translation"], rows, caption)])


def _newest_drawn(story: RunStory) -> list[Html]:
    """Newly drawn sentences of the newest validations of each corpus."""
    by_corpus: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in story.samples:
        by_corpus[str(record.get("corpus", "validation"))].append(record)
    source, target = languages(story)
    parts = []
    for corpus, records in by_corpus.items():
        rows = [
            [f"{record.get('step', 0):,}", words(each.get("source"), source), words(each.get("translation"), target),
             words(each.get("reference"), target)]
            for record in reversed(records[-NEWEST_DRAWN:]) for each in _sentences(record) if not each.get("fixed")
        ]  # fmt: skip
        if rows:
            head = ["step", "source", "translation", "reference"]
            parts += [tag("h3", f"Drawn anew at each validation: {corpus}"), table(head, rows)]
    return parts


def words(text: Any, language: str | None) -> Html:
    """A sentence marked with its language and shown in its direction."""
    return tag("span", str(text or ""), lang=language, dir="auto")


def languages(story: RunStory) -> tuple[str | None, str | None]:
    source, target = (story.settings.get(f"data.{side}_language") for side in ("source", "target"))
    return str(source) if source else None, str(target) if target else None


def _steps(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _spread(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
