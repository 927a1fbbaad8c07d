"""A window builder that needs no corpus, for tests of the loader: it can be sent to loader processes."""

import numpy as np
from planned_rows import micro_batches

from dist_transformer.data.loader.partition import Planner
from dist_transformer.data.loader.window import BatchShape, Window
from dist_transformer.data.loader.window_request import WindowRequest


class RowsBuilder:
    """Windows whose tokens are the row numbers."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def build(self, request: WindowRequest) -> Window:
        batches = micro_batches(self._planner, request)
        shapes = tuple(BatchShape(len(b), 1, 1, len(b), len(b), len(b)) for b in batches)
        ids = [row for batch in batches for row in batch]
        tokens = [row % 2**31 for batch in batches for row in batch * 2]
        return Window(request, shapes, np.array(tokens, np.int32), np.array(ids, np.int64), {}, ())
