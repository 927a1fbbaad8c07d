"""The cross-entropy filter: of scored pairs those of the worst scores are dropped (Junczys-Dowmunt, 2018)."""

from collections.abc import Iterator
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_transformer.decoding.sharded_files import numbered_lines, same_lines
from dist_transformer.errors import UserError
from dist_transformer.files import replacing, write_json


def kept_pairs(scores: NDArray[np.float64], drop: float) -> NDArray[np.bool_]:
    """Returns whether each pair stays: all but the `drop` share of lowest scores, NaN first; of equal ones the first stay."""
    last_first = np.where(np.isnan(scores), -np.inf, scores)[::-1]
    rank: NDArray[np.int64] = last_first.argsort(kind="stable").argsort()[::-1]
    return rank >= int(len(scores) * drop)


def filter_files(source: Path, target: Path, scores: Path, drop: float, folder: Path) -> None:
    """Writes the kept lines of two files as `folder`/source and target, then counts.json.

    Raises UserError if the files differ in their numbers of lines, or a line of `scores` is not numbers.
    """
    num_lines = same_lines(source, target, scores)
    is_kept = kept_pairs(np.fromiter(_means(scores), np.float64, num_lines), drop)
    for path, name in ((source, "source"), (target, "target")):
        with replacing(folder / name) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as out:
            out.writelines(f"{line}\n" for line in compress(numbered_lines(path), is_kept))
    write_json(folder / "counts.json", {"lines": num_lines, "kept_lines": int(is_kept.sum())})


def _means(scores: Path) -> Iterator[float]:
    """Yields the mean of the numbers of each line: of the log-probabilities of a sentence's tokens."""
    for number, line in enumerate(numbered_lines(scores), start=1):
        try:
            values = [float(word) for word in line.split()]
            yield sum(values) / len(values)
        except (ValueError, ZeroDivisionError):
            raise UserError(f"{scores}, line {number}: {line[:40]!r}: expected a number or several") from None
