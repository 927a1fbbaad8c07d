"""Shares in which the corpora of a mixture are drawn, and from when on they hold: integers, no random state."""

from collections.abc import Sequence

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.data.loader.partition import Stage

SHARE_UNITS = 10**9


def stages(data: DataConfig, rows: Sequence[int]) -> tuple[Stage, ...]:
    """Returns the stages of training corpora with these numbers of rows; a single corpus has one without shares."""
    mixture = data.mixture
    if mixture is None:
        return (Stage(0, None),)
    numbers, later = {name: number for number, name in enumerate(mixture.corpora)}, []
    for stage in mixture.schedule:
        after = [
            (numbers[name], round(epochs * rows[numbers[name]])) for name, epochs in (stage.after_epochs or {}).items()
        ]
        # Step 1 uses batch 0.
        later.append(Stage((stage.from_step or 1) - 1, shares_of([stage.weights[name] for name in numbers]), *after))
    first = None
    if mixture.weights is not None:
        first = shares_of([mixture.weights[name] for name in mixture.corpora])
    elif mixture.temperature != 1.0:
        # Arivazhagan et al. (2019), "Massively Multilingual Neural Machine Translation in the Wild", section 4.1
        first = shares_of([(count / sum(rows)) ** (1 / mixture.temperature) for count in rows])
    return (Stage(0, first), *later)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Converts weights to integers, so that the choice of a row does not depend on floating-point rounding."""
    total = sum(weights)
    return tuple(round(weight / total * SHARE_UNITS) for weight in weights)
