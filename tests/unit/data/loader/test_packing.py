"""Packed batches: one shape, every row once and whole, cumulative lengths that find it again, and little waste."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.data.loader.packing import PackedShape, decoder_input, pack, packed_shape
from dist_transformer.data.loader.rows import Rows

PAD, BOS, EOS = 0, 1, 2
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=120)


def rows_of(source_lengths, target_lengths, random) -> Rows:
    def side(lengths):
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        ids = random.integers(4, 100, offsets[-1])
        ids[offsets[1:] - 1] = EOS
        return ids, offsets

    return Rows(10 * np.arange(len(source_lengths)), *side(source_lengths), *side(target_lengths))


def sentences(ids, offsets) -> list[list[int]]:
    return [ids[first:last].tolist() for first, last in pairwise(offsets)]


@given(LENGTHS, st.integers(40, 200), st.integers(40, 200), st.integers(1, 20), st.integers(0, 99))
def test_every_row_is_whole_in_one_batch_where_its_cumulative_lengths_say(lengths, source, target, sequences, seed):
    random = np.random.default_rng(seed)
    rows = rows_of([s for s, _ in lengths], [t for _, t in lengths], random)
    batches = pack(rows, random.permutation(len(lengths)), PackedShape(source, target, sequences), PAD)
    found = []
    for batch in batches:
        assert 1 <= len(batch.row_ids) <= sequences
        sides = (
            sentences(batch.source_ids, batch.source_ends[: len(batch.row_ids) + 1]),
            sentences(batch.target_ids, batch.target_ends[: len(batch.row_ids) + 1]),
        )
        found += zip(batch.row_ids.tolist(), *sides, strict=True)
    sides = sentences(rows.source_ids, rows.source_offsets), sentences(rows.target_ids, rows.target_offsets)
    assert sorted(found) == sorted(zip(rows.row_ids.tolist(), *sides, strict=True))


@given(LENGTHS, st.integers(0, 99))
def test_all_batches_have_one_shape_and_only_padding_behind_their_rows(lengths, seed):
    rows = rows_of([s for s, _ in lengths], [t for _, t in lengths], np.random.default_rng(seed))
    shape = PackedShape(128, 192, 16)
    for batch in pack(rows, np.arange(len(lengths)), shape, PAD):
        for ids, positions, ends, budget in (
            (batch.source_ids, batch.source_positions, batch.source_ends, shape.source_tokens),
            (batch.target_ids, batch.target_positions, batch.target_ends, shape.target_tokens),
        ):
            assert ids.shape == positions.shape == (budget,)
            assert ends.shape == (shape.sequences + 1,)
            assert (ids == PAD).nonzero()[0].tolist() == list(range(ends[-1], budget))
            assert (ends[len(batch.row_ids) :] == ends[-1]).all()
            expected = np.concatenate([np.arange(length) for length in np.diff(ends)])
            assert positions[: ends[-1]].tolist() == expected.tolist()
            assert not positions[ends[-1] :].any()


def test_the_decoder_reads_each_target_behind_a_begin_of_sentence():
    rows = rows_of([2, 3], [3, 2], np.random.default_rng(1))
    (batch,) = pack(rows, np.array([1, 0]), PackedShape(8, 8, 2), PAD)
    first, second = sentences(rows.target_ids, rows.target_offsets)[::-1]
    assert decoder_input(batch, BOS)[:5].tolist() == [BOS, *first[:-1], BOS, *second[:-1]]


def test_budgets_in_the_ratio_of_the_corpus_waste_at_most_three_percent_and_less_than_equal_ones():
    random = np.random.default_rng(1)
    source = np.clip(random.lognormal(3.27, 0.44, 10_000), 2, 256).astype(np.int64)
    target = np.clip(source * random.lognormal(0.05, 0.18, 10_000), 2, 256).astype(np.int64)
    rows = rows_of(source, target, random)

    def waste(shape: PackedShape) -> float:
        batches = pack(rows, np.arange(len(source)), shape, PAD)
        return 1 - (source.sum() + target.sum()) / (len(batches) * (shape.source_tokens + shape.target_tokens))

    shape = packed_shape(8192, len(source), int(source.sum()), int(target.sum()))
    assert shape.source_tokens + shape.target_tokens == 8192
    assert waste(shape) <= 0.03
    assert waste(shape) < waste(PackedShape(4096, 4096, shape.sequences))


def test_a_row_that_no_batch_can_hold_is_refused():
    with pytest.raises(AssertionError):
        pack(rows_of([9], [3], np.random.default_rng(1)), np.array([0]), PackedShape(8, 8, 2), PAD)
