"""Checks between the settings of validation: its metric is measured, and the settings that depend on it can work."""

from collections.abc import Iterator

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.metrics import TOKEN_MEASURES, TRANSLATION_MEASURES, corpus_and_measure
from dist_transformer.config.schema import ValidationConfig


def check_validation(validation: ValidationConfig, data: DataConfig) -> Iterator[str]:
    """Checks the metric, the ends of a run that depend on it, and COMET."""
    yield from _metric_problems(validation, data)
    if corpus_and_measure(validation.metric)[0] is None and data.validation is None:
        for key in ("patience", "target"):
            if getattr(validation, key) is not None:
                yield (
                    f"validation.{key}: is about {validation.metric} of data.validation, which is not given; give it, or "
                    "name another corpus in validation.metric"
                )
    if validation.comet is not None and not validation.translate:
        yield "validation.comet: scores translations, and validation.translate is false; set it true, or remove comet"


def _metric_problems(validation: ValidationConfig, data: DataConfig) -> Iterator[str]:
    corpus, measure = corpus_and_measure(validation.metric)
    if corpus is not None and corpus not in data.more_validation:
        there = ", ".join(data.more_validation) or "none"
        yield f"validation.metric: {corpus!r} is no corpus of data.more_validation; there are: {there}"
    measures = (*TOKEN_MEASURES, *TRANSLATION_MEASURES)
    if measure not in measures:
        yield (
            f"validation.metric: {measure!r} is no measure; expected one of {', '.join(measures)}, for a corpus of "
            "data.more_validation with its name in front: NAME/bleu"
        )
    elif measure in TRANSLATION_MEASURES and not validation.translate:
        yield f"validation.metric: {measure} needs validation.translate: true; set it, or take another metric"
    elif measure == "comet" and validation.comet is None:
        yield "validation.metric: comet needs validation.comet, the model to score with; set both or neither"
