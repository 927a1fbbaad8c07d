"""Token buckets: grouping of the rows of a window into micro-batches of at most `max_tokens` padded tokens.

Rows are sorted by target length in coarse steps, and within a step by source length in alternating direction (a snake),
so that neighbours are close on both sides; the budget is on rows x (longest source + longest target). Compared with the
usual sort by (target, source) with a budget on the longer side, this halves padding and equalises the cost of batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TARGET_STEP_TOKENS = 4
"""Width of a step of target lengths that are sorted together: wider mixes target lengths, narrower source lengths."""


class Bucket(NamedTuple):
    """The rows of one micro-batch, their number, and the lengths that they are padded to."""

    members: Ints
    rows: int
    source_length: int
    target_length: int


def buckets_of(source_lengths: Ints, target_lengths: Ints, order: Ints, max_tokens: int) -> list[Bucket]:
    """Groups all rows into micro-batches as long as their longest rows. Rows of equal lengths stay in their order."""
    order = order[snake_order(source_lengths[order], target_lengths[order])]
    source, target = source_lengths[order], target_lengths[order]
    return [
        Bucket(order[first:last], last - first, int(source[first:last].max()), int(target[first:last].max()))
        for first, last in cut_by_tokens(source, target, max_tokens)
    ]


def snake_order(source_lengths: Ints, target_lengths: Ints) -> Ints:
    """Returns row indices sorted so that neighbours have nearly equal lengths on both sides. Shapes: (rows,)."""
    step = target_lengths // TARGET_STEP_TOKENS
    within = np.where(step % 2 == 0, source_lengths, -source_lengths)
    return np.lexsort((within, step))


def cut_by_tokens(source_lengths: Ints, target_lengths: Ints, max_tokens: int) -> list[tuple[int, int]]:
    """Cuts rows in the given order into runs (first, last) whose padded size is at most `max_tokens`.

    A single row longer than the budget becomes a run of its own; the length filter removes such rows.
    """
    runs = []
    first = 0
    while first < len(source_lengths):
        # No run is longer than one whose rows are all as long as its first.
        most_rows = max(1, max_tokens // int(source_lengths[first] + target_lengths[first]))
        longest = np.maximum.accumulate(source_lengths[first : first + most_rows])
        longest = longest + np.maximum.accumulate(target_lengths[first : first + most_rows])
        sizes = longest * np.arange(1, len(longest) + 1)
        last = first + max(1, int(np.searchsorted(sizes, max_tokens, side="right")))
        runs.append((first, last))
        first = last
    return runs


def straggler_ratio(padded_tokens_by_lane: Sequence[int]) -> float:
    """Ratio of a step's largest micro-batch to the mean: the wait of a rank with one lane. 0: a lane without one."""
    sizes = [size for size in padded_tokens_by_lane if size]
    return max(sizes) * len(sizes) / sum(sizes) if sizes else 1.0
