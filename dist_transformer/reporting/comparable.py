"""Comparability of the scores of several runs: only scores that were measured alike may be ranked."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dist_transformer.config.metrics import TRANSLATION_MEASURES, corpus_and_measure
from dist_transformer.reporting.run_history import RunStory, settings_that_differ

OF_TRANSLATIONS = (
    "validation.beam_size",
    "validation.max_sentences",
    "decoding.length_penalty",
    "decoding.max_extra_tokens",
)
"""Settings on which bleu, chrf and comet depend besides the weights and the corpus."""
OF_TOKENS = ("tokenizer.type", "tokenizer.vocabulary_size", "tokenizer.shared", "tokenizer.source_model")
"""Settings of the pieces over which loss, nll, perplexity and token accuracy are averaged."""
OF_EVALUATION = ("source_sha256", "reference_sha256", "pairs", "beam_size", "length_penalty", "max_extra_tokens")
"""Entries of the files in evaluation/ that must be equal."""


def differences(stories: Sequence[RunStory], keys: Iterable[str]) -> list[str]:
    """Settings that begin with one of `keys` and are not the same in all runs, in order."""
    wanted = tuple(keys)
    found = [
        {key: value for key, (value, _) in settings_that_differ(story.settings).items() if key.startswith(wanted)}
        for story in stories
    ]
    every = dict.fromkeys(key for each in found for key in each)
    return [key for key in every if any(each.get(key) != found[0].get(key) for each in found)]


def why_not_alike(stories: Sequence[RunStory], measure: str) -> list[str]:
    """Settings by which a measure of validation differs between runs; empty: it may be compared."""
    corpus, key = corpus_and_measure(measure)
    found = _other_text(stories, f"data.more_validation.{corpus}" if corpus else "data.validation")
    if key in TRANSLATION_MEASURES:
        return found + differences(stories, [*OF_TRANSLATIONS, *(["validation.comet"] if key == "comet" else [])])
    smoothing = ["training.label_smoothing"] if key == "loss" else []
    return found + _other_pieces(stories) + differences(stories, ["data.filters.", *smoothing])


def why_evaluated_otherwise(
    stories: Sequence[RunStory], evaluations: Sequence[Mapping[str, Any]], name: str, measure: str
) -> list[str]:
    """Settings by which results of `evaluate`, none of them empty, differ between runs under this name."""
    keys = (*OF_EVALUATION, f"{measure}_signature" if measure != "comet" else "comet_model")
    found = [key for key in keys if any(each.get(key) != evaluations[0].get(key) for each in evaluations)]
    if all("source_sha256" in each for each in evaluations):
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


def _other_pieces(stories: Sequence[RunStory]) -> list[str]:
    known = [story.prepared.pieces for story in stories if story.prepared and story.prepared.pieces]
    if known and len(known) == len(stories):
        return ["the pieces of the tokenizer"] if len(set(known)) > 1 else []
    return differences(stories, OF_TOKENS)
