"""The measures of a validation corpus by name, and which way is better.

A metric is a measure of data.validation (`bleu`), or of another corpus, with its name in front (`newstest2013/bleu`).
"""

from collections.abc import Mapping
from typing import Any

TOKEN_MEASURES = ("loss", "nll", "perplexity", "token_accuracy")
"""Those of the reference itself, always there."""
TRANSLATION_MEASURES = ("bleu", "chrf", "comet")
"""Those of real output: with validation.translate; comet with validation.comet besides."""
SEARCH_OF_VALIDATION = ("length_penalty", "max_extra_tokens", "no_repeat_ngram_size", "max_source_tokens")
"""Settings of `decoding` that the translations of a validation are made with."""
LOWER_IS_BETTER = ("loss", "nll", "perplexity")


def corpus_and_measure(metric: str) -> tuple[str | None, str]:
    """The parts of a metric; None: data.validation."""
    corpus, _, measure = metric.rpartition("/")
    return corpus or None, measure


def measured_with(settings: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The settings that a value of the metric depends on, beside the weights and data.validation, which stays what it is
    for all of a run: where they differ, so do two values of the same model.

    `settings`: sections of settings, as a configuration has them.
    """
    corpus, measure = corpus_and_measure(metric)
    found: dict[str, Any] = {}
    if corpus is not None:
        found["corpus"] = settings["data"].get("more_validation", {}).get(corpus)
    if measure == "loss":
        found["label_smoothing"] = settings["training"]["label_smoothing"]
    if measure in TRANSLATION_MEASURES:
        found |= {key: settings["validation"].get(key) for key in ("beam_size", "max_sentences", "comet")}
        found |= {key: settings["decoding"].get(key) for key in SEARCH_OF_VALIDATION}
        found["language"] = settings["data"]["target_language"]
    return found


def is_lower_better(metric: str) -> bool:
    """Whether a metric is the better the lower it is."""
    return corpus_and_measure(metric)[1] in LOWER_IS_BETTER


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether `value` is better than `than`; NaN never is, and anything else is better than NaN."""
    if value != value or than != than:
        return value == value
    return value < than if is_lower_better(metric) else value > than
