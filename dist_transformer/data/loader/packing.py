"""Packed batches: rows concatenated without padding between them, in arrays of one shape.

    source_ids        a b . c d e . f .  0  0          two sides, each with its own budget, padding only at the end
    source_positions  0 1 2 0 1 2 3 0 1  0  0          start from 0 in every row
    source_ends     0     3       7   9  9  9          row i is ids[ends[i]:ends[i + 1]]; the last ones are empty

The second layout of a window beside padded micro-batches (window.py), from the same rows: for attention kernels that
take cumulative lengths. One shape needs one compilation or one captured graph, and is equal work on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dist_transformer.data.loader.batching import Ints
from dist_transformer.data.loader.rows import Rows

OPEN_BATCHES = 8
"""Number of open batches: a row goes into the first of them that has room for both its sides."""
BUDGET_MULTIPLE = 64
SEGMENTS_MULTIPLE = 8
SEGMENTS_MARGIN = 1.4
"""Ratio of the most rows in a batch to those of an average batch, large enough for a batch of many short rows."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class PackedShape:
    """The common size of all packed batches: tokens of each side, and the largest number of rows."""

    source_tokens: int
    target_tokens: int
    sequences: int


@dataclass(frozen=True)
class PackedBatch:
    """One packed batch, as in the example above. `row_ids` are the ids of its rows, in order, without padding.

    `source_ends` and `target_ends` have shape (sequences + 1,), the other arrays that of their side's budget.
    """

    row_ids: Ints
    source_ids: Tokens
    source_positions: Tokens
    source_ends: Tokens
    target_ids: Tokens
    target_positions: Tokens
    target_ends: Tokens


def packed_shape(max_tokens: int, num_rows: int, source_tokens: int, target_tokens: int) -> PackedShape:
    """Returns the shape for a corpus of these counts: `max_tokens` divided so that both sides fill up at the same time.

    With equal budgets the longer language would fill its side first, and the rest of the other side would be wasted.
    """
    tokens = source_tokens + target_tokens
    source = max(1, round(max_tokens * source_tokens / tokens / BUDGET_MULTIPLE)) * BUDGET_MULTIPLE
    rows_of_average = max_tokens * num_rows / tokens
    sequences = int(np.ceil(rows_of_average * SEGMENTS_MARGIN / SEGMENTS_MULTIPLE)) * SEGMENTS_MULTIPLE
    return PackedShape(source, max_tokens - source, sequences)


def pack(rows: Rows, order: Ints, shape: PackedShape, pad_id: int) -> list[PackedBatch]:
    """Packs the rows of `order` into batches, first fit in that order. No row is longer than its side's budget."""
    source_lengths, target_lengths = np.diff(rows.source_offsets), np.diff(rows.target_offsets)
    assert source_lengths[order].max(initial=0) <= shape.source_tokens
    assert target_lengths[order].max(initial=0) <= shape.target_tokens
    batches = _first_fit(source_lengths[order].tolist(), target_lengths[order].tolist(), shape)
    return [_lay_out(rows, order[members], shape, pad_id) for members in batches]


def decoder_input(batch: PackedBatch, bos_id: int) -> Tokens:
    """Returns the decoder input: the target of every row shifted by one place, after a begin-of-sentence."""
    shifted = np.roll(batch.target_ids, 1)
    shifted[batch.target_positions == 0] = bos_id
    return shifted


def _first_fit(source_lengths: Sequence[int], target_lengths: Sequence[int], shape: PackedShape) -> list[list[int]]:
    """Returns indices into the given lists, batch by batch. If no open batch has room, closes the fullest."""
    closed: list[list[int]] = []
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for row, (source, target) in enumerate(zip(source_lengths, target_lengths, strict=True)):
        for place, (source_room, target_room) in enumerate(room):
            if source <= source_room and target <= target_room and len(members[place]) < shape.sequences:
                break
        else:
            if len(room) == OPEN_BATCHES:
                fullest = min(range(OPEN_BATCHES), key=lambda place: sum(room[place]))
                closed.append(members.pop(fullest))
                room.pop(fullest)
            place, source_room, target_room = len(room), shape.source_tokens, shape.target_tokens
            members.append([])
            room.append((source_room, target_room))
        members[place].append(row)
        room[place] = (source_room - source, target_room - target)
    return closed + members


def _lay_out(rows: Rows, members: Ints, shape: PackedShape, pad_id: int) -> PackedBatch:
    source = _end_to_end(rows.source_ids, rows.source_offsets, members, shape.source_tokens, shape.sequences, pad_id)
    target = _end_to_end(rows.target_ids, rows.target_offsets, members, shape.target_tokens, shape.sequences, pad_id)
    return PackedBatch(rows.row_ids[members], *source, *target)


def _end_to_end(
    ids: Ints, offsets: Ints, members: Ints, budget: int, sequences: int, pad_id: int
) -> tuple[Tokens, Tokens, Tokens]:
    """Lays out one side: ids, positions, and ends of the rows."""
    lengths = offsets[members + 1] - offsets[members]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    tail = budget - int(ends[-1])
    packed = np.pad(ids[np.repeat(offsets[members], lengths) + positions], (0, tail), constant_values=pad_id)
    ends = np.pad(ends, (0, sequences - len(members)), mode="edge")
    return packed.astype(np.int32), np.pad(positions, (0, tail)).astype(np.int32), ends.astype(np.int32)
