"""The loader: the lanes' order on any ranks, from any position, with and without loader processes."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import ALONE, Ranks
from planned_rows import lane_batches, row_ids
from rows_builder import RowsBuilder

from dist_transformer.data.loader.loader import LaneLoader
from dist_transformer.data.loader.partition import PartitionPlan, Planner, Stage
from dist_transformer.data.loader.position import Position, Quarantined, position_from_json
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, WindowRequest
from dist_transformer.data.loader.workers import LoaderSettings
from dist_transformer.errors import MachineError

BOS_ID = 1
STAGES = (Stage(0, (2, 1)), Stage(9, (1, 3)), Stage(0, (3, 1), (1, 10 * 17)), Stage(30, (1, 0)))
"""The third begins after the tenth pass over the second corpus."""
PLANNER = Planner(((7, 12, 3, 20, 9) * 3, (5, 4, 8)), 4, 11, 5, STAGES)


def ranks_of(
    num_ranks: int, position: Position, batch: int, settings: LoaderSettings = ALONE, planner: Planner = PLANNER
) -> Ranks:
    return Ranks(RowsBuilder(planner), planner, num_ranks, position, batch, settings)


def start(planner=PLANNER) -> Position:
    return Position.start(planner.first_partition())


@pytest.fixture(scope="module")
def alone():
    """The first 60 global batches of one rank: three changes of weights and several epochs."""
    ranks, shares = ranks_of(1, start(), 0), []
    batches = []
    for _ in range(60):
        batches.append(ranks.step())
        shares.append(ranks.position.partition.shares)
    assert list(dict.fromkeys(shares)) == [stage.shares for stage in STAGES]
    uses = Counter(r for b in batches[: shares.index((3, 1))] for rows in b.values() for r in rows if r >> CORPUS_SHIFT)
    assert set(uses.values()) == {10}
    return batches


def test_without_weights_the_batches_of_a_lane_are_those_of_its_windows_in_order():
    planner = Planner(((7, 12, 3, 20, 9) * 3,), 4, 11, 5)
    ranks = ranks_of(1, start(planner), 0, planner=planner)
    partition = planner.first_partition()
    expected = [[batch for batch, _ in lane_batches(planner, partition, lane, (0, 0))] for lane in range(4)]
    for number in range(max(map(len, expected))):
        assert ranks.step() == {lane: batches[number] for lane, batches in enumerate(expected) if number < len(batches)}
    ranks.step()
    assert ranks.position.partition.epoch == 1


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_global_batches_are_the_same_on_any_number_of_ranks(alone, num_ranks):
    ranks = ranks_of(num_ranks, start(), 0)
    assert [ranks.step() for _ in range(60)] == alone


@pytest.mark.parametrize("stops", [[1, 9, 10, 11, 29, 31], list(range(0, 60, 2)), [59]])
def test_stopped_anywhere_and_resumed_on_other_ranks_the_batches_go_on_the_same(alone, stops):
    ranks, found, kinds = ranks_of(1, start(), 0), [], itertools.cycle([3, 1, 4, 2])
    for number in range(60):
        if number in stops:
            ranks = ranks_of(next(kinds), ranks.position, ranks.batch)
        found.append(ranks.step())
    assert found == alone


@pytest.mark.parametrize(("passes", "used", "number"), [(1, {3, 4}, 1), (5, {5}, 1), (20, {20}, 0)])
def test_a_stage_of_passes_that_a_resume_adds_begins_where_they_are_used_up_and_not_with_the_next_epoch(
    passes, used, number
):
    """The epoch was cut by a schedule without it, and goes nine times through the second corpus. One pass is used up when
    the stage is added: the windows that were begun are finished. The twentieth is not in this epoch, which stays as it is."""
    before = Planner(((7, 12, 3, 20, 9) * 3, (5, 4)), 2, 11, 5, (Stage(0, (1, 1)),))
    after = replace(before, stages=(*before.stages, Stage(0, (1, 0), (1, passes * 9))))
    ranks, uses = ranks_of(1, start(before), 0, planner=before), Counter()
    for batch in range(80):
        if batch in (10, 14):
            ranks = ranks_of(2, ranks.position, ranks.batch, planner=after)
        uses.update(row for rows in ranks.step().values() for row in rows if row >> CORPUS_SHIFT)
        if batch == 10:
            assert (ranks.position.partition.epoch, ranks.position.partition.number) == (0, number)
    assert {*uses.values()} == used


def test_loader_processes_change_nothing(alone):
    ranks = ranks_of(1, start(), 0, LoaderSettings(BOS_ID, 2, 60))
    assert [ranks.step() for _ in range(60)] == alone


def test_at_a_change_of_weights_what_was_read_ahead_by_the_old_ones_is_not_used():
    planner = Planner(((40,) * 9, (40,) * 9), 2, 12, 5, (Stage(0, (1, 0)), Stage(5, (0, 1))))
    ranks = ranks_of(2, start(planner), 0, LoaderSettings(BOS_ID, 1, 60), planner)
    corpora = [{row >> 44 for rows in ranks.step().values() for row in rows} for _ in range(12)]
    assert corpora[:5] == [{0}] * 5
    # Batches 5 to 7 finish the windows of four micro-batches that were begun.
    assert corpora[8:] == [{1}] * 4


class LosingBuilder(RowsBuilder):
    """Loses row group 1 of corpus 0 wherever it is asked for, unless told to leave it out already."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner)
        self.asked: list[WindowRequest] = []

    def build(self, request):
        self.asked.append(request)
        is_hit = any((piece.corpus, piece.row_group) == (0, 1) for piece in request.slices)
        lost = (Quarantined(request.key, 0, 1, "row group 1 of train-00000.parquet", "OSError"),) if is_hit else ()
        kept = tuple(piece for piece in request.slices if (piece.corpus, piece.row_group) != (0, 1))
        window = super().build(replace(request, slices=kept))
        return replace(window, request=request, quarantined=lost, dropped={"empty": 2})


def test_what_a_window_lost_is_told_once_with_the_step_that_begins_it_and_left_out_again_after_a_resume():
    planner = Planner(((10,) * 12,), 2, 20, 5)
    loader = LaneLoader(LosingBuilder(planner), planner, start(planner), 0, [0, 1], ALONE)
    steps, positions = [loader.next_step()], []
    while any(steps[-1].batches):
        positions.append(tuple(loader.lane_positions().values()))
        steps.append(loader.next_step())
    told = [quarantined for step in steps for quarantined in step.quarantined]
    assert told
    assert len({entry.key for entry in told}) == len(told)
    assert sum((step.dropped for step in steps), Counter())["empty"] == 2 * 6
    number = next(n for n, step in enumerate(steps) if step.quarantined)
    entry = steps[number].quarantined[0]
    builder = LosingBuilder(planner)
    position = Position(planner.first_partition(), positions[number], (entry,))
    resumed = LaneLoader(builder, planner, position, number + 1, [0, 1], ALONE)
    again = resumed.next_step()
    assert isinstance(entry, Quarantined)
    assert {request.key: request.quarantined for request in builder.asked}[entry.key] == ((0, 1),)
    assert entry not in again.quarantined


class FailingDisk(RowsBuilder):
    """Row groups that cannot be read are left out of the windows that begin; which ones they are changes."""

    def __init__(self, planner: Planner, unreadable: set[tuple[int, int]]) -> None:
        super().__init__(planner)
        self._unreadable = unreadable

    def build(self, request):
        hit = {(piece.corpus, piece.row_group) for piece in request.slices} & {*self._unreadable, *request.quarantined}
        kept = tuple(piece for piece in request.slices if (piece.corpus, piece.row_group) not in hit)
        lost = tuple(Quarantined(request.key, *group, "a row group", "OSError") for group in sorted(hit))
        return replace(super().build(replace(request, slices=kept)), request=request, quarantined=lost)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.sets(st.integers(0, 8), max_size=3)), max_size=6),
    st.data(),
)
def test_in_any_chain_of_stops_on_a_failing_disk_every_row_is_used_once_or_told_to_be_left_out(
    group_rows, starts, data
):
    """Each start: so many ranks, the steps until it stops, and the row groups that it cannot read."""
    groups = [(corpus, number) for corpus, rows in enumerate(group_rows) for number in range(len(rows))]
    num_lanes = data.draw(st.integers(1, min(5, sum(map(sum, group_rows)))))
    planner = Planner(group_rows, num_lanes, data.draw(st.integers(1, 12)), 5)
    position, batch, used = start(planner), 0, Counter()
    for num_ranks, steps, unreadable in [*starts, (1, 10_000, set())]:
        disk = FailingDisk(planner, {groups[number] for number in unreadable if number < len(groups) - 1})
        ranks = Ranks(disk, planner, min(num_ranks, num_lanes), position, batch)
        for _ in range(steps):
            try:
                rows = ranks.step()
            except MachineError:  # one that was begun with what cannot be read now: the next start finds it mended
                break
            if ranks.position.partition.epoch > 0:
                break
            used.update(row for lane in rows.values() for row in lane)
            position, batch = (
                position_from_json(json.loads(json.dumps(ranks.position.to_json())), "state.json"),
                ranks.batch,
            )
    told = {
        (entry.key, entry.corpus, entry.row_group) for entry in (*position.quarantined, *ranks.position.quarantined)
    }
    left_out = Counter()
    for key, corpus, row_group in told:
        if key.epoch == 0:
            request = planner.plan(planner.first_partition()).request(key.lane, key.window)
            slices = tuple(piece for piece in request.slices if (piece.corpus, piece.row_group) == (corpus, row_group))
            left_out.update(row_ids(planner, replace(request, slices=slices)))
    rows = ((c << CORPUS_SHIFT) + row for c, count in enumerate(planner.rows) for row in range(count))
    assert used + left_out == Counter(rows)


def test_a_window_that_was_begun_with_a_row_group_is_not_gone_on_with_without_it():
    planner = Planner(((10,) * 12,), 2, 20, 5)
    partition = planner.first_partition()
    plan = planner.plan(partition)
    windows = [(lane, number) for lane in range(2) for number in range(plan.num_windows(lane))]
    has_group = [at for at in windows if any(piece.row_group == 1 for piece in plan.request(*at).slices)]
    lane, number = has_group[0]
    begun = Position(partition, tuple((number, 2) if each == lane else (0, 0) for each in range(2)))
    loader = LaneLoader(LosingBuilder(planner), planner, begun, 9, [lane], ALONE)
    with pytest.raises(  # a job is requeued, as the disk may be away
        MachineError, match=r"row group 1 of train-00000\.parquet .*could when .* was begun.*Restore the file"
    ):
        loader.next_step()


class CountingStream:
    """Stands for the loader processes: what was asked for and not taken yet."""

    def __init__(self, builder: RowsBuilder) -> None:
        self._builder, self.waiting = builder, set()
        self.most = 0

    def ask(self, request: WindowRequest) -> None:
        self.waiting.add(request)
        self.most = max(self.most, len(self.waiting))

    def take(self, request: WindowRequest):
        self.waiting.discard(request)
        return self._builder.build(request)


class UnevenBuilder(RowsBuilder):
    """Windows of lane 0 hold one micro-batch, as where its rows are dropped or short."""

    def build(self, request):
        slices = request.slices if request.key.lane else request.slices[:1]
        return super().build(replace(request, slices=slices))


def test_one_window_a_lane_is_read_ahead_however_unevenly_the_lanes_advance():
    planner = Planner(((2,) * 400,), 2, 12, 5)
    builder = UnevenBuilder(planner)
    loader = LaneLoader(builder, planner, start(planner), 0, [0, 1], ALONE)
    loader._windows = stream = CountingStream(builder)
    while loader.next_step().batches[1] is not None:
        pass
    assert loader.lane_positions()[0][0] == 34
    assert stream.most == 2


def test_a_window_is_planned_once(monkeypatch: pytest.MonkeyPatch):
    """The trainer plans it, between two steps."""
    planned, request = Counter(), PartitionPlan.request

    def counted(plan: PartitionPlan, lane: int, window: int) -> WindowRequest:
        planned[lane, window] += 1
        return request(plan, lane, window)

    monkeypatch.setattr(PartitionPlan, "request", counted)
    planner = Planner(((7, 12, 3, 20, 9) * 3,), 4, 11, 5)
    ranks = ranks_of(2, start(planner), 0, planner=planner)
    for _ in range(10):
        ranks.step()
    assert len(planned) > 8
    assert {*planned.values()} == {1}


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    st.data(),
)
def test_every_window_that_a_lane_opens_is_that_of_the_plan_and_was_asked_for_however_few_rows_a_mixture_has(
    group_rows, data
):
    weights = st.lists(st.integers(1, 9), min_size=len(group_rows), max_size=len(group_rows)).map(tuple)
    changes = data.draw(st.lists(st.integers(1, 20), max_size=2, unique=True).map(sorted))
    waits = st.tuples(st.integers(0, len(group_rows) - 1), st.integers(0, 30))
    stages = (Stage(0, data.draw(weights)), *(Stage(at, data.draw(weights), data.draw(waits)) for at in changes))
    num_lanes = data.draw(st.integers(1, sum(map(sum, group_rows))))
    planner = Planner(group_rows, num_lanes, data.draw(st.integers(1, 5)), 5, stages)
    opened = LaneLoader._open

    def checked(loader: LaneLoader, lane: int) -> None:
        assert loader._asked[lane] == loader._plan.request(lane, loader.lane_positions()[lane][0])
        opened(loader, lane)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dist_transformer.data.loader.loader.WindowStream", PromptStream)
        patch.setattr(LaneLoader, "_open", checked)
        ranks = ranks_of(data.draw(st.integers(1, num_lanes)), start(planner), 0, planner=planner)
        for _ in range(30):
            ranks.step()


class PromptStream:
    """Stands for the loader processes: what was never asked for is never built."""

    def __init__(self, builder: RowsBuilder, here: set[WindowRequest], settings: LoaderSettings) -> None:
        self._builder, self._there = builder, set(here)

    def ask(self, request: WindowRequest) -> None:
        self._there.add(request)

    def restart(self) -> None:
        self._there = set()

    def take(self, request: WindowRequest):
        self._there.remove(request)
        return self._builder.build(request)


def test_a_mixture_of_few_rows_a_lane_goes_on_with_loader_processes():
    planner = Planner(((1,), (1,), (1, 1, 1)), 4, 5, 5, (Stage(0, (1, 1, 1)),))
    ranks = ranks_of(1, start(planner), 0, LoaderSettings(BOS_ID, 1, 60), planner)
    alone = ranks_of(1, start(planner), 0, planner=planner)
    assert [ranks.step() for _ in range(20)] == [alone.step() for _ in range(20)]


def test_a_lane_without_a_row_in_any_epoch_asks_for_nothing_and_gives_none():
    planner = Planner(((2,), (1,)), 4, 5, 1)
    empty = [lane for lane in range(4) if planner.plan(planner.first_partition()).num_windows(lane) == 0]
    loader = LaneLoader(RowsBuilder(planner), planner, start(planner), 0, empty, LoaderSettings(BOS_ID, 1, 30))
    assert loader.next_step().batches == [None] * len(empty)
    loader.start_epoch(1)
    assert loader.next_step().batches == [None] * len(empty)
