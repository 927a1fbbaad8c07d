"""Reads the rows of a window."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Sentence pairs as token ids: side i of row r is `ids[offsets[r]:offsets[r + 1]]`."""

    row_ids: Ints
    source_ids: Ints
    source_offsets: Ints
    target_ids: Ints
    target_offsets: Ints


@dataclass(frozen=True)
class LostRowGroup:
    """A row group that was left out of a window because it could not be read."""

    corpus: int
    row_group: int
    file: str
    reason: str


@dataclass(frozen=True)
class RowsRead:
    """What became of the rows of a window.

    Attributes:
        rows: those to train on.
        dropped: rows dropped by rule (see filters.RULES); only where text is tokenized on the fly.
        lost: row groups left out, newly or as requested.
    """

    rows: Rows
    dropped: dict[str, int]
    lost: tuple[LostRowGroup, ...]
