"""The measures of a validation corpus by name, and which way is better.

A metric is a measure of data.validation (`bleu`), or of another corpus, with its name in front (`newstest2013/bleu`).
"""

TOKEN_MEASURES = ("loss", "nll", "perplexity", "token_accuracy")
"""Those of the reference itself, always there."""
TRANSLATION_MEASURES = ("bleu", "chrf", "comet")
"""Those of real output: with validation.translate; comet with validation.comet besides."""
LOWER_IS_BETTER = ("loss", "nll", "perplexity")


def corpus_and_measure(metric: str) -> tuple[str | None, str]:
    """The parts of a metric; None: data.validation."""
    corpus, _, measure = metric.rpartition("/")
    return corpus or None, measure


def is_lower_better(metric: str) -> bool:
    """Whether a metric is the better the lower it is."""
    return corpus_and_measure(metric)[1] in LOWER_IS_BETTER


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether `value` is better than `than`; NaN never is, and anything else is better than NaN."""
    if value != value or than != than:
        return value == value
    return value < than if is_lower_better(metric) else value > than
