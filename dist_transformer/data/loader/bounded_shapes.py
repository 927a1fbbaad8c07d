"""Micro-batches of few shapes, for kernels that are compiled or captured for each shape: `data.batch_shapes: bounded`.

    bounded_shapes(max_tokens=8192, longest_tokens=256)     # (rows, source length, target length)
    [(512, 8, 8), (336, 8, 16), (336, 16, 8), (256, 16, 16), ..., (16, 256, 256)]

Lengths come from a table of about twelve, and the two of a shape are at most one place apart in it: for a pair of very
unequal sides the shorter side is padded more. The number of rows is what fits into the budget, rounded down to a
multiple of 8: rows x length, the height of the matrices a GPU multiplies, is then a multiple of 64. Left-over rows of
a shape move up into the next one, so that only the last micro-batch or two of a window are filled up with dummy rows.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from dist_transformer.data.loader.batching import Bucket, Ints

SHORT_LENGTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96)
"""Lengths of most sentences. 128, 192, 256, 384, 512, ... follow."""
LENGTH_MULTIPLE = 8
ROWS_MULTIPLE = 8
BAND = 1
"""Largest distance in the table between the two lengths of a shape. 2 saves 1 % padding, but gives half as many shapes
again."""

Shape = tuple[int, int, int]


@lru_cache
def bounded_shapes(max_tokens: int, longest_tokens: int) -> tuple[Shape, ...]:
    """Returns all shapes (rows, source length, target length) of micro-batches, those with fewest tokens a row first.

    `longest_tokens` is the longest side of any pair; `max_tokens` is at least twice as large.
    """
    lengths = _lengths(max_tokens, longest_tokens)
    pairs = [(s, t) for i, s in enumerate(lengths) for t in lengths[max(0, i - BAND) : i + BAND + 1]]
    in_order = sorted(pairs, key=lambda pair: (sum(pair), pair))
    return tuple((_num_rows(max_tokens // (s + t)), s, t) for s, t in in_order)


def bounded_buckets(
    source_lengths: Ints, target_lengths: Ints, order: Ints, max_tokens: int, longest_tokens: int
) -> list[Bucket]:
    """Groups all rows into micro-batches of `bounded_shapes`."""
    assert max(source_lengths.max(initial=0), target_lengths.max(initial=0)) <= longest_tokens
    shapes = bounded_shapes(max_tokens, longest_tokens)
    waiting = _rows_by_shape(source_lengths, target_lengths, order, shapes)
    buckets = []
    for place, shape in enumerate(shapes):
        members, num_rows = waiting.pop(place, order[:0]), shape[0]
        num_full = len(members) // num_rows * num_rows
        buckets += [Bucket(members[i : i + num_rows], *shape) for i in range(0, num_full, num_rows)]
        if len(left_over := members[num_full:]):
            above = next((p for p in sorted(waiting) if _covers(shapes[p], shape)), None)
            if above is None:
                buckets.append(Bucket(left_over, *shape))
            else:
                waiting[above] = np.concatenate([waiting[above], left_over])
    return buckets


def _lengths(max_tokens: int, longest_tokens: int) -> list[int]:
    """Returns the table up to the longest side, which its last entry covers; twice that entry fits into the budget."""
    assert 2 * longest_tokens <= max_tokens, (longest_tokens, max_tokens)
    last = min(-(-longest_tokens // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_tokens // 2)
    return [*(length for length in _endless_lengths(last) if length < last), last]


def _endless_lengths(up_to: int) -> Iterator[int]:
    yield from SHORT_LENGTHS
    length = 128
    while length < up_to:
        yield from (length, length * 3 // 2)
        length *= 2


def _num_rows(rows_that_fit: int) -> int:
    return max(rows_that_fit // ROWS_MULTIPLE * ROWS_MULTIPLE, min(rows_that_fit, ROWS_MULTIPLE))


def _rows_by_shape(source_lengths: Ints, target_lengths: Ints, order: Ints, shapes: Sequence[Shape]) -> dict[int, Ints]:
    """Returns for each index in `shapes` the rows whose smallest shape it is, in the given order."""
    lengths = np.unique([length for _, length, _ in shapes])
    source = np.searchsorted(lengths, source_lengths[order])
    target = np.searchsorted(lengths, target_lengths[order])
    source, target = np.maximum(source, target - BAND), np.maximum(target, source - BAND)
    place_of = np.full((len(lengths), len(lengths)), -1)
    for place, (_, source_length, target_length) in enumerate(shapes):
        place_of[np.searchsorted(lengths, source_length), np.searchsorted(lengths, target_length)] = place
    places = place_of[source, target]
    by_place = np.argsort(places, kind="stable")
    found, firsts = np.unique(places[by_place], return_index=True)
    return dict(zip(found.tolist(), np.split(order[by_place], firsts[1:]), strict=True)) if len(order) else {}


def _covers(larger: Shape, smaller: Shape) -> bool:
    return larger[1] >= smaller[1] and larger[2] >= smaller[2]
