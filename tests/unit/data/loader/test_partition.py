"""The plan as a property: every row once in each pass, whatever the lanes, the stops, the weights and the cuts."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planned_rows import drain, lane_batches, row_ids

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.data.loader.mixture import refuse_undrawn, shares_of, stages
from dist_transformer.data.loader.partition import Planner, Stage, Stream, apportion
from dist_transformer.data.loader.position import Position, Quarantined, position_from_json
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, WindowKey, WindowRequest
from dist_transformer.errors import CheckpointError, DataError

corpora = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8).map(tuple), min_size=1, max_size=3).map(tuple)
lanes = st.integers(1, 6)
window_rows = st.integers(1, 40)
seeds = st.integers(0, 2**32)


def all_rows(planner: Planner) -> list[int]:
    return sorted((c << CORPUS_SHIFT) + row for c, count in enumerate(planner.rows) for row in range(count))


def still_to_use(planner: Planner, partition) -> Counter[int]:
    """Rows in what the streams have left over of passes that were begun."""
    pieces = ((c, piece) for c, stream in enumerate(partition.streams) for piece in stream.pending)
    slices = tuple(each for corpus, piece in pieces for each in planner.slices(corpus, iter([piece])))
    return Counter(row_ids(planner, WindowRequest(WindowKey(0, 0, 0, 0), slices)))


def passes_begun(planner: Planner, partition) -> Counter[int]:
    """Every row as often as passes over its corpus were begun."""
    return Counter({row: partition.streams[row >> CORPUS_SHIFT].next_pass for row in all_rows(planner)}) + Counter()


def start_of(partition):
    return Position.start(partition).lanes


@given(corpora, lanes, window_rows, seeds)
def test_an_epoch_uses_every_row_once_and_the_next_one_too(group_rows, num_lanes, rows, seed):
    planner = Planner(group_rows, num_lanes, rows, seed)
    partition = planner.first_partition()
    for epoch in range(3):
        assert partition.epoch == epoch
        assert sorted(drain(planner, partition, start_of(partition))) == all_rows(planner)
        partition = planner.after_epoch(partition, epoch)


@given(corpora, lanes, window_rows, seeds)
def test_lanes_are_equally_long_and_windows_no_longer_than_asked(group_rows, num_lanes, rows, seed):
    planner = Planner(group_rows, num_lanes, rows, seed)
    plan = planner.plan(planner.first_partition())
    sizes = []
    for lane in range(num_lanes):
        windows = [
            sum(piece.last - piece.first for piece in plan.request(lane, window).slices)
            for window in range(plan.num_windows(lane))
        ]
        # A share of each corpus is rounded by itself.
        assert all(size <= rows + len(group_rows) for size in windows)
        sizes.append(sum(windows))
    assert max(sizes) - min(sizes) <= len(group_rows)


def test_seed_and_epoch_decide_on_the_order():
    planner = Planner(((5,) * 20,), 2, 10, seed=1)
    first = planner.first_partition()
    orders = [
        drain(planner, first, start_of(first)),
        drain(planner, planner.after_epoch(first, 1), [(0, 0)] * 2),
        drain(Planner(((5,) * 20,), 2, 10, seed=2), first, start_of(first)),
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] == drain(Planner(((5,) * 20,), 2, 10, seed=1), first, start_of(first))


@settings(max_examples=60, deadline=None)
@given(
    corpora,
    window_rows,
    seeds,
    st.lists(st.tuples(lanes, st.lists(st.integers(0, 12), min_size=6, max_size=6)), max_size=5),
)
def test_cut_anew_into_any_lanes_any_number_of_times_an_epoch_still_uses_every_row_once(
    group_rows, rows, seed, cuts
):  # fmt: skip
    """Each cut: so many micro-batches of each lane are used, then the rest goes into so many other lanes."""
    planner = Planner(group_rows, 3, rows, seed)
    position = Position.start(planner.first_partition())
    used = []
    for num_lanes, counts in cuts:
        reached = []
        for lane, at in enumerate(position.lanes):
            for batch, after in islice(lane_batches(planner, position.partition, lane, at), counts[lane]):
                used += batch
                at = after
            reached.append(at)
        text = json.dumps(Position(position.partition, tuple(reached)).to_json())
        saved = position_from_json(json.loads(text), "state.json")
        assert saved == Position(position.partition, tuple(reached))
        position = Position.start(planner.repartition(saved.partition, saved.lanes, 0, num_lanes))
        planner = Planner(group_rows, num_lanes, rows, seed)
    used += drain(planner, position.partition, position.lanes)
    assert sorted(used) == all_rows(planner)
    following = planner.after_epoch(position.partition, 0)
    assert sorted(drain(planner, following, start_of(following))) == all_rows(planner)


@settings(max_examples=60, deadline=None)
@given(corpora, lanes, window_rows, seeds, st.data())
def test_with_changing_weights_every_pass_over_a_corpus_still_uses_each_of_its_rows_once(
    group_rows, num_lanes, rows, seed, data
):
    weights = st.lists(st.integers(1, 9), min_size=len(group_rows), max_size=len(group_rows)).map(tuple)
    planner = Planner(group_rows, num_lanes, rows, seed, (Stage(0, data.draw(weights)), Stage(1, data.draw(weights))))
    position, used = Position.start(planner.first_partition()), Counter()
    reached = []
    for lane, at in enumerate(position.lanes):
        for batch, after in islice(lane_batches(planner, position.partition, lane, at), data.draw(st.integers(0, 9))):
            used.update(batch)
            at = after
        reached.append(at)
    partition = planner.repartition(position.partition, reached, 1, num_lanes)
    for _ in range(4):
        used.update(drain(planner, partition, start_of(partition)))
        partition = planner.after_epoch(partition, 1)
        assert used + still_to_use(planner, partition) == passes_begun(planner, partition)


@settings(max_examples=60, deadline=None)
@given(corpora, lanes, window_rows, seeds, st.data())
def test_a_stage_that_waits_for_passes_begins_where_each_row_of_its_corpus_was_used_so_often(
    group_rows, num_lanes, rows, seed, data
):
    weights = st.lists(st.integers(1, 9), min_size=len(group_rows), max_size=len(group_rows)).map(tuple)
    corpus, passes = data.draw(st.integers(0, len(group_rows) - 1)), data.draw(st.integers(1, 3))
    totals = [sum(groups) for groups in group_rows]
    before, after = data.draw(weights | st.none()), (*data.draw(weights)[:-1], 10)
    assume(before is None or apportion(sum(totals), before)[corpus])
    stages = (Stage(0, before), Stage(0, after, (corpus, passes * totals[corpus])))
    planner = Planner(group_rows, num_lanes, rows, seed, stages)
    partition, used = planner.first_partition(), Counter()
    while partition.shares == before:
        used.update(drain(planner, partition, start_of(partition)))
        partition = planner.after_epoch(partition, 0)
    assert partition.shares == after
    counts = {row: used[row] for row in all_rows(planner) if row >> CORPUS_SHIFT == corpus}
    assert set(counts.values()) == {passes}
    assert used + still_to_use(planner, partition) == passes_begun(planner, partition)


def test_an_epoch_is_cut_at_a_stage_or_made_a_little_longer_so_that_none_of_a_few_rows_follows():
    def quotas(passes: float) -> list[tuple[int, ...]]:
        schedule = [{"after_epochs": {"small": passes}, "weights": {"large": 1, "small": 0}}]
        made = stages(mixture(weights={"large": 3, "small": 1}, schedule=schedule), [300, 100])
        planner = Planner(((300,), (100,)), 2, 50, 1, made)
        epochs = [planner.first_partition()]
        while epochs[-1].shares == made[0].shares:
            epochs.append(planner.after_epoch(epochs[-1], 0))
        return [epoch.quotas for epoch in epochs]

    assert quotas(1.0) == [(300, 100), (400, 0)]
    assert quotas(1.5) == [(300, 100), (150, 50), (400, 0)]
    assert quotas(0.5) == [(150, 50), (400, 0)]
    assert quotas(1.1) == [(330, 110), (400, 0)]


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**9), min_size=1, max_size=6).filter(any))
def test_a_quota_is_off_by_less_than_a_row_and_all_rows_are_given_out(rows, shares):
    quotas = apportion(rows, shares)
    assert sum(quotas) == rows
    assert all(abs(quota - rows * share / sum(shares)) < 1.001 for quota, share in zip(quotas, shares, strict=True))


def test_the_lanes_go_through_the_passes_over_a_small_corpus_together():
    planner = Planner(((10,) * 400, (10,) * 8), 4, 40, 1, (Stage(0, shares_of([3, 1])),))
    plan, used = planner.plan(planner.first_partition()), Counter()
    for window in range(plan.num_windows(0)):
        for lane in range(4):
            used.update(row for row in row_ids(planner, plan.request(lane, window)) if row >> CORPUS_SHIFT)
        # Four windows take 40 of its 80 rows.
        assert max(used.values()) - min(used[(1 << CORPUS_SHIFT) + row] for row in range(80)) <= 1


def test_the_passes_over_a_small_corpus_are_counted_once_and_not_in_each_step(monkeypatch: pytest.MonkeyPatch):
    planner = Planner(((3000,), (10,)), 2, 100, 1, (Stage(0, shares_of([0.5, 0.5])),))
    plan = planner.plan(planner.first_partition())
    num_windows = plan.num_windows(0)
    monkeypatch.setattr(plan, "_lane_pieces", lambda *_: pytest.fail("the passes are counted again"))
    assert plan.num_windows(0) == num_windows == 16


def test_every_window_holds_the_corpora_in_their_shares():
    planner = Planner(((10,) * 60, (10,) * 40), 2, 100, 1, (Stage(0, shares_of([3, 1])),))
    plan = planner.plan(planner.first_partition())
    for lane in range(2):
        for window in range(plan.num_windows(lane)):
            counts = Counter()
            for piece in plan.request(lane, window).slices:
                counts[piece.corpus] += piece.last - piece.first
            assert counts[0] + counts[1] == pytest.approx(100, abs=2)
            assert counts[0] == pytest.approx(75, abs=1)


def test_after_a_change_of_weights_the_windows_that_were_begun_are_finished_and_the_next_ones_hold_the_new_shares():
    planner = Planner(((10,) * 60, (10,) * 60), 2, 100, 1, (Stage(0, shares_of([1, 0])), Stage(7, shares_of([0, 1]))))
    first = planner.first_partition()
    partition = planner.repartition(first, [(1, 5), (1, 4)], 7, 2)
    plan = planner.plan(partition)
    for lane in range(2):
        assert plan.request(lane, 0) == planner.plan(first).request(lane, 1)
        later = [plan.request(lane, window).slices for window in range(1, plan.num_windows(lane))]
        assert {piece.corpus for pieces in later for piece in pieces} == {1}
    assert sum(partition.quotas) == 1200 - 4 * 100


@given(st.integers(1, 20), st.lists(st.integers(0, 60), max_size=4))
def test_a_stream_after_a_quota_is_the_stream_without_it(rows_of_pass, quotas):
    whole = [(n, row) for n in range(300 // rows_of_pass + 2) for row in range(rows_of_pass)]
    stream, gone = Stream(), 0
    for quota in quotas:
        stream, gone = stream.after(quota, [], rows_of_pass), gone + quota
        front = [(n, row) for n, first, last in stream.cut(0, 40, rows_of_pass) for row in range(first, last)]
        assert front == whole[gone : gone + 40]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4), st.integers(1, 20), st.data())
def test_rows_of_a_stream_are_those_of_a_plain_walk_over_its_pieces(pending, rows_of_pass, data):
    """Also empty pieces, which streams of saved positions may have."""
    stream = Stream(tuple((n, first, first + rows) for n, (first, rows) in enumerate(pending)), len(pending))
    passes = [(stream.next_pass + n, 0, rows_of_pass) for n in range(100 // rows_of_pass + 1)]
    first, last = sorted(data.draw(st.tuples(st.integers(0, 100), st.integers(0, 100))))
    walked, begin = [], 0
    for number, piece_first, piece_last in (*stream.pending, *passes):
        end = begin + piece_last - piece_first
        if end > first and begin < last:
            walked.append((number, piece_first + max(first - begin, 0), piece_first + min(last, end) - begin))
        begin = end
    assert [*stream.cut(first, last, rows_of_pass)] == walked


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_window_after_thousands_of_passes_over_a_small_corpus_takes_no_more_work_than_the_rows_of_its_own(
    is_saved: bool,
):
    """`is_saved`: the passes are pending pieces, as behind a change of weights."""
    planner = Planner(((10,) * 6000, (5, 5)), 2, 400, 1, (Stage(0, shares_of([1, 1])),))
    partition = planner.first_partition()
    if is_saved:
        partition = planner.repartition(partition, [(0, 1), (0, 1)], 0, 2)
        assert len(partition.streams[1].pending) > 2900
    plan = planner.plan(partition)
    plan.request(1, 1)  # which counts the passes
    for window in (1, plan.num_windows(0) - 2):
        slices = plan.request(0, window).slices
        assert calls_in(lambda window=window: plan.request(0, window)) < 40 * len(slices) < 4000


def calls_in(act: Callable[[], object]) -> int:
    """Number of calls, and of values that generators yield."""
    events = Counter()
    sys.setprofile(lambda _frame, event, _value: events.update([event]))
    try:
        act()
    finally:
        sys.setprofile(None)
    return events["call"]


def mixture(**settings) -> DataConfig:
    corpora = {name: {"path": f"{name}.tsv"} for name in ("large", "small")}
    return DataConfig.model_validate({"mixture": {"corpora": corpora, **settings}})


def test_without_weights_and_temperature_an_epoch_is_each_pair_once():
    assert stages(mixture(), [900, 100]) == (Stage(0, None),)


def test_a_temperature_draws_by_the_root_of_the_share_of_pairs():
    (stage,) = stages(mixture(temperature=5.0), [900, 100])
    large, small = 0.9**0.2, 0.1**0.2
    assert stage.shares[0] / sum(stage.shares) == pytest.approx(large / (large + small))


def test_the_lowest_temperatures_draw_the_largest_corpus():
    assert stages(mixture(temperature=0.002), [60, 40]) == (Stage(0, shares_of([1, 0])),)
    data = DataConfig.model_validate(
        {"mixture": {"corpora": {name: {"path": f"{name}.tsv"} for name in "abcde"}, "temperature": 0.002}}
    )
    assert stages(data, [30, 20, 30, 10, 10]) == (Stage(0, shares_of([1, 0, 1, 0, 0])),)


@pytest.mark.parametrize(
    ("settings", "rows", "said"),
    [
        ({"weights": {"large": 10_000, "small": 1}}, (4000, 20), "weights: no pair of small would ever be drawn"),
        ({"weights": {"large": 10_000, "small": 1}}, (6000, 20), None),
        ({"weights": {"large": 1, "small": 0}}, (4000, 20), None),
        ({"temperature": 0.1}, (4000, 20), "temperature: no pair of small would ever be drawn"),
        ({}, (4000, 1), None),
        (
            {"schedule": [{"from_step": 9, "weights": {"large": 1e-12, "small": 1}}]},
            (4000, 20),
            "schedule.0.weights: no pair of large would ever be drawn",
        ),
    ],
    ids=str,
)
def test_a_corpus_with_a_share_of_no_pair_in_an_epoch_is_refused(settings, rows, said):
    """Quotas are rounded anew in each epoch: such a corpus is in none, however many follow."""
    data = mixture(**settings)
    planner = Planner(tuple((count,) for count in rows), 2, 50, 1, stages(data, rows))
    if said is None:
        refuse_undrawn(data.mixture, planner)
    else:
        with pytest.raises(DataError, match=rf"data\.mixture\.{said}.* an epoch has {sum(rows):,} pairs"):
            refuse_undrawn(data.mixture, planner)


def test_scheduled_weights_hold_from_the_batch_of_their_step_on():
    schedule = [{"from_step": 100, "weights": {"large": 0, "small": 2}}]
    planner = Planner(
        ((9,), (1,)), 1, 5, 1, stages(mixture(weights={"large": 1, "small": 1}, schedule=schedule), [9, 1])
    )
    streams = planner.first_partition().streams
    assert planner.stage_at(98, streams) == (shares_of([1, 1]), (0, 0))
    assert planner.stage_at(99, streams) == (shares_of([0, 1]), (0, 0))  # batch 99 makes step 100


def test_the_position_of_64_lanes_is_small():
    planner = Planner(((4096,) * 1000,), 64, 20_000, 1)
    position = Position(planner.first_partition(), ((3, 141),) * 64)
    assert len(json.dumps(position.to_json(), separators=(",", ":"))) < 1024


def test_a_position_of_another_version_is_refused_with_both_versions():
    value = {**Position.start(Planner(((9,),), 1, 5, 1).first_partition()).to_json(), "version": 7}
    with pytest.raises(CheckpointError, match=r"state\.json.*version 7.*reads version 1.*run\.name"):
        position_from_json(value, "state.json")


def test_open_windows_of_checkpoints_from_before_slices_had_a_pass_are_read():
    planner = Planner(((9, 9), (5,)), 2, 4, 1)
    partition = planner.repartition(planner.first_partition(), [(0, 1), (1, 0)], 0, 2)
    position = Position.start(partition)
    value = json.loads(json.dumps(position.to_json()))
    for windows in value["open"].values():
        for window in windows:
            window["slices"] = [piece[:4] for piece in window["slices"]]
    assert value["open"]
    assert position_from_json(value, "state.json") == position  # of the first pass


def test_row_groups_left_out_are_counted_for_good_but_named_for_two_epochs_only():
    def lost(epoch: int, row_group: int) -> Quarantined:
        return Quarantined(WindowKey(epoch, 0, 1, 2), 0, row_group, "row group 3 of train.parquet", "gone")

    position = Position.start(Planner(((9,),), 1, 5, 1).first_partition())
    for epoch in range(4):
        position = position.with_quarantined([lost(epoch, 3), lost(epoch, 5)])
    assert position.ever_quarantined == ((0, 3), (0, 5))
    assert {entry.key.epoch for entry in position.quarantined} == {2, 3}
    assert position_from_json(json.loads(json.dumps(position.to_json())), "state.json") == position
