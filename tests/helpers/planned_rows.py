"""Stands in for windows where only the order of rows matters: a window is cut into micro-batches of a few rows."""

from collections.abc import Iterator

import numpy as np

from dist_transformer.data.loader.partition import LanePositions, Partition, Planner
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, WindowRequest

ROWS_OF_MICRO_BATCH = 3


def row_ids(planner: Planner, request: WindowRequest) -> list[int]:
    """The ids of a window's rows: row groups are numbered through, as in a prepared corpus that was never shuffled."""
    starts = [np.cumsum([0, *groups]) for groups in planner.group_rows]
    return [
        (piece.corpus << CORPUS_SHIFT) + int(starts[piece.corpus][piece.row_group]) + row
        for piece in request.slices
        for row in range(piece.first, piece.last)
    ]


def micro_batches(planner: Planner, request: WindowRequest) -> list[list[int]]:
    ids = row_ids(planner, request)
    return [ids[first : first + ROWS_OF_MICRO_BATCH] for first in range(0, len(ids), ROWS_OF_MICRO_BATCH)]


def lane_batches(
    planner: Planner, partition: Partition, lane: int, position: tuple[int, int]
) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Micro-batches of a lane from a position on, each with the position after it."""
    plan = planner.plan(partition)
    window, emitted = position
    while window < plan.num_windows(lane):
        batches = micro_batches(planner, plan.request(lane, window))
        for number in range(emitted, len(batches)):
            yield batches[number], (window, number + 1)
        window += 1
        emitted = plan.emitted_before(lane, window)


def drain(planner: Planner, partition: Partition, lanes: LanePositions) -> list[int]:
    """All rows of the segment from these positions on."""
    return [
        row
        for lane, position in enumerate(lanes)
        for batch, _ in lane_batches(planner, partition, lane, position)
        for row in batch
    ]
