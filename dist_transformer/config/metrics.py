"""The measures of a validation corpus: how each is named and written, and the direction in which it is better.

A metric is a measure of data.validation (`bleu`), or of another corpus, with its name in front (`newstest2013/bleu`).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Words = Literal["moses", "spaces"]
"""Source of the words of tokenised BLEU: Moses' tokenizer, or the spaces of the text."""


class Measure(NamedTuple):
    """A measure: its name and format on pages, the text that it is computed on, and its better direction."""

    name: str
    form: str
    measured_on: Literal["translations", "references", "earlier versions"]
    is_lower_better: bool = False


MEASURES = {
    "bleu": Measure("BLEU", ".2f", "translations"), "chrf": Measure("chrF", ".2f", "translations"),
    "comet": Measure("COMET", ".4f", "earlier versions"), "plugin": Measure("plug-in", ".4f", "translations"),
    "loss": Measure("loss", ".4f", "references", True), "perplexity": Measure("perplexity", ".2f", "references", True),
    "token_accuracy": Measure("token accuracy", ".1%", "references"), "nll": Measure("nll", ".4f", "references", True),
}  # fmt: skip
"""Every measure, in the order of pages."""
TOKEN_MEASURES = tuple(sorted(key for key, each in MEASURES.items() if each.measured_on == "references"))
"""Measures computed on the reference itself, always available."""
TRANSLATION_MEASURES = tuple(key for key, each in MEASURES.items() if each.measured_on == "translations")
"""Measures of real output: with validation.translate; plugin with validation.plugin, too."""
OF_TRANSLATIONS = (
    *("validation.beam_size", "validation.max_sentences", "data.target_language"),
    *("decoding.length_penalty", "decoding.max_extra_tokens", "decoding.max_source_tokens"),
)
"""Settings on which every measure of translations depends."""


def corpus_and_measure(metric: str) -> tuple[str | None, str]:
    """Splits a metric into its corpus (None: data.validation) and its measure."""
    corpus, _, measure = metric.rpartition("/")
    return corpus or None, measure


def settings_of_measure(measure: str) -> list[str]:
    """Returns the settings that a measure depends on, besides the weights and the corpus."""
    if measure in TRANSLATION_MEASURES:
        return [*OF_TRANSLATIONS, *(["validation.plugin"] if measure == "plugin" else [])]
    return ["training.label_smoothing"] if measure == "loss" else []


def measured_with(settings: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Returns the settings that a value of the metric depends on: if they differ, two values of the same model differ.

    The weights and data.validation, which does not change in a run, are not among them.
    `settings`: sections of settings, as in a configuration.
    """
    corpus, measure = corpus_and_measure(metric)
    found: dict[str, Any] = {}
    if corpus is not None:
        found["corpus"] = settings["data"].get("more_validation", {}).get(corpus)
    keys = {key: key.split(".") for key in settings_of_measure(measure)}
    return found | {key: settings[section].get(name) for key, (section, name) in keys.items()}


def signature_of(values: Mapping[str, Any], metric: str) -> str:
    """Returns the signature of the metric among the values of a validation, without a program's version; "" if unknown."""
    return str(values.get(f"{metric}_signature")).rpartition("|version:")[0]


def is_lower_better(metric: str) -> bool:
    """True if lower values of the metric are better. Raises KeyError if its measure is none of MEASURES."""
    return MEASURES[corpus_and_measure(metric)[1]].is_lower_better


def is_better(metric: str, value: float, than: float) -> bool:
    """True if `value` is better than `than`; NaN never is, and any other value is better than NaN."""
    if value != value or than != than:
        return value == value
    return value < than if is_lower_better(metric) else value > than
