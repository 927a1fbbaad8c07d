"""Which scores of several runs may be called better or worse: those that were measured alike."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dist_transformer.config.measures import TRANSLATION_MEASURES, corpus_and_measure
from dist_transformer.reporting.reading import RunStory, settings_that_differ

OF_TRANSLATIONS = (
    "validation.beam_size",
    "validation.max_sentences",
    "decoding.length_penalty",
    "decoding.max_extra_tokens",
)
"""What bleu, chrf and comet depend on besides the weights and the corpus."""
OF_TOKENS = ("tokenizer.type", "tokenizer.vocabulary_size", "tokenizer.shared", "tokenizer.source_model")
"""What the pieces are that loss, nll, perplexity and token accuracy are a mean over."""
OF_EVALUATION = ("pairs", "beam_size", "length_penalty", "max_extra_tokens")
"""Of the files in evaluation/."""


def differences(stories: Sequence[RunStory], keys: Iterable[str]) -> list[str]:
    """Those settings that begin with one of `keys` and are not the same in all runs, in order."""
    wanted = tuple(keys)
    found = [
        {key: value for key, (value, _) in settings_that_differ(story.settings).items() if key.startswith(wanted)}
        for story in stories
    ]
    every = dict.fromkeys(key for each in found for key in each)
    return [key for key in every if any(each.get(key) != found[0].get(key) for each in found)]


def why_not_alike(stories: Sequence[RunStory], measure: str) -> list[str]:
    """The settings by which a measure of validation is another one from run to run; empty: it may be compared."""
    corpus, key = corpus_and_measure(measure)
    keys = [f"data.more_validation.{corpus}." if corpus else "data.validation."]
    if key in TRANSLATION_MEASURES:
        keys += [*OF_TRANSLATIONS, *(["validation.comet"] if key == "comet" else [])]
    else:
        keys += [*OF_TOKENS, *(["training.label_smoothing"] if key == "loss" else [])]
    return differences(stories, keys)


def why_evaluated_otherwise(evaluations: Sequence[Mapping[str, Any]], measure: str) -> list[str]:
    """The same of results of `evaluate`, of which none is empty."""
    keys = (*OF_EVALUATION, f"{measure}_signature" if measure != "comet" else "comet_model")
    return [key for key in keys if any(each.get(key) != evaluations[0].get(key) for each in evaluations)]
