"""The loaders of all ranks in one process, advanced together as the feed of training does."""

from dataclasses import replace

from dist_transformer.data.loader.loader import LaneLoader
from dist_transformer.data.loader.partition import Planner
from dist_transformer.data.loader.position import Position, Quarantined
from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.loader.workers import LoaderSettings

ALONE = LoaderSettings(bos_id=1, num_workers=0, stall_seconds=30)


class Ranks:
    """The loaders of all ranks, advanced together as the feed does."""

    def __init__(
        self,
        builder: WindowBuilder,
        planner: Planner,
        num_ranks: int,
        position: Position,
        batch: int,
        settings: LoaderSettings = ALONE,
    ) -> None:
        self.planner, self.batch, self.position = planner, batch, position
        lanes = [range(rank, planner.num_lanes, num_ranks) for rank in range(num_ranks)]
        self.loaders = [LaneLoader(builder, planner, position, batch, own, settings) for own in lanes]

    def step(self) -> dict[int, list[int]]:
        """Rows by lane of the next global batch; the position after it is kept."""
        lanes: dict[int, list[int]] = {}
        left_out: list[Quarantined] = []
        while not lanes:
            self._recut_where_due()
            steps = [loader.next_step() for loader in self.loaders]
            left_out += [row_group for step in steps for row_group in step.quarantined]
            lanes = {b.lane: b.row_ids.tolist() for step in steps for b in step.batches if b is not None}
            if not lanes:
                for loader in self.loaders:
                    loader.start_epoch(self.batch)
        self.batch += 1
        now = replace(self.position, partition=self.loaders[0].partition, lanes=tuple(self._positions()))
        self.position = now.with_quarantined(left_out) if left_out else now
        return lanes

    def _recut_where_due(self) -> None:
        due = {loader.must_repartition(self.batch) for loader in self.loaders}
        assert len(due) == 1
        if due == {True}:
            positions = self._positions()
            for loader in self.loaders:
                loader.repartition(positions, self.batch)

    def _positions(self) -> list[tuple[int, int]]:
        lanes = {lane: at for loader in self.loaders for lane, at in loader.lane_positions().items()}
        return [lanes[lane] for lane in range(self.planner.num_lanes)]
