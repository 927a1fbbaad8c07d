"""Shares in which the corpora of a mixture are drawn, and from when on they hold: integers, no random state."""

from collections.abc import Sequence

from dist_transformer.config.data_schema import DataConfig, MixtureConfig
from dist_transformer.data.loader.partition import Planner, Stage, apportion
from dist_transformer.errors import DataError

SHARE_UNITS = 10**9


def stages(data: DataConfig, rows: Sequence[int]) -> tuple[Stage, ...]:
    """Returns the stages of training corpora with these numbers of rows; a single corpus has one without shares."""
    mixture = data.mixture
    if mixture is None:
        return (Stage(0, None),)
    numbers, later = {name: number for number, name in enumerate(mixture.corpora)}, []
    for stage in mixture.schedule:
        after_epochs = stage.after_epochs or {}
        after = [(numbers[name], round(epochs * rows[numbers[name]])) for name, epochs in after_epochs.items()]
        # Step 1 uses batch 0.
        later.append(Stage((stage.from_step or 1) - 1, shares_of([stage.weights[name] for name in numbers]), *after))
    first = None
    if mixture.weights is not None:
        first = shares_of([mixture.weights[name] for name in mixture.corpora])
    elif mixture.temperature != 1.0:
        # Arivazhagan et al. (2019), "Massively Multilingual Neural Machine Translation in the Wild", section 4.1
        power, total = 1 / mixture.temperature, sum(rows)
        whole = total if (max(rows) / total) ** power else max(rows)  # where every share would be too small for a float
        first = shares_of([(count / whole) ** power for count in rows])
    return (Stage(0, first), *later)


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Converts weights to integers, so that the choice of a row does not depend on floating-point rounding."""
    total = sum(weights)
    return tuple(round(weight / total * SHARE_UNITS) for weight in weights)


def refuse_undrawn(mixture: MixtureConfig | None, planner: Planner) -> None:
    """Raises DataError for a weight above 0 that is not a pair in an epoch: quotas are rounded anew in each."""
    if mixture is None:
        return
    first = ("weights", mixture.weights) if mixture.weights else ("temperature", dict.fromkeys(mixture.corpora, 1.0))
    later = ((f"schedule.{number}.weights", stage.weights) for number, stage in enumerate(mixture.schedule))
    total = sum(planner.rows)
    for (key, weights), stage in zip((first, *later), planner.stages, strict=True):
        quotas = planner.rows if stage.shares is None else apportion(total, stage.shares)
        undrawn = [name for name, quota in zip(mixture.corpora, quotas, strict=True) if weights[name] and not quota]
        if undrawn:
            raise DataError(
                f"data.mixture.{key}: no pair of {', '.join(undrawn)} would ever be drawn: an epoch has {total:,} pairs, "
                "and its share of them rounds to none. Raise the share, or leave the corpus out"
            )
