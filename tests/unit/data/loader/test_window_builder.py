"""Windows as micro-batches: every row once and unchanged, a function of the request."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rows_helpers import as_lists, changed_bytes, reader_of, request, write_token_split

from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.window import Window, WindowBuilder
from dist_transformer.data.loader.window_request import WindowKey
from dist_transformer.data.sources import retries
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import DataError

PAD, BOS, EOS, MAX_TOKENS = 0, 1, 2, 96
SLICES = ((0, 0, 3, 30), (0, 2, 0, 30), (0, 1, 5, 12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def reader(folder: Path) -> RowReader:
    splits = {"train": ((30, 30), (30,)), "validation": ((40,), (25,))}
    return reader_of(folder, {name: write_token_split(folder, name, files) for name, files in splits.items()})


def builder(reader: RowReader, seed: int = 1) -> WindowBuilder:
    return WindowBuilder(reader, MAX_TOKENS, SpecialTokens(BOS, EOS, PAD), seed)


def micro_batches(window: Window) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(row ids, source, target) of each micro-batch; the sides padded."""
    found, row, token = [], 0, 0
    for shape in window.shapes:
        middle = token + shape.rows * shape.source_length
        end = middle + shape.rows * shape.target_length
        sides = (window.tokens[part].reshape(shape.rows, -1) for part in (slice(token, middle), slice(middle, end)))
        found.append((window.row_ids[row : row + shape.pairs], *sides))
        row, token = row + shape.pairs, end
    assert (row, token) == (len(window.row_ids), len(window.tokens))
    return found


def unpadded(window: Window) -> list[tuple[int, list[int], list[int]]]:
    """(row id, source ids, target ids) of each real row; asserts that the rest is padding."""
    found = []
    for shape, (row_ids, *sides) in zip(window.shapes, micro_batches(window), strict=True):
        real = [[ids[: np.count_nonzero(ids)].tolist() for ids in side[: shape.pairs]] for side in sides]
        assert [sum(map(len, side)) for side in real] == [shape.source_tokens, shape.target_tokens]
        for ids, side in zip(real, sides, strict=True):
            assert all((side[row, len(own) :] == PAD).all() for row, own in enumerate(ids))
        found += zip(row_ids.tolist(), *real, strict=True)
    return found


def test_a_window_holds_each_row_of_its_slices_once_and_unchanged_within_the_budget(reader):
    window = builder(reader).build(request(*SLICES))
    assert sorted(unpadded(window)) == sorted(as_lists(reader.read(request(*SLICES))))
    assert all(shape.padded_tokens <= MAX_TOKENS for shape in window.shapes)


def test_the_same_request_gives_the_same_window_in_any_process(reader):
    here = builder(reader)
    there = pickle.loads(pickle.dumps(here))
    one, other = (b.build(request(*SLICES)) for b in (here, there))
    assert one.shapes == other.shapes
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.row_ids.tolist() == other.row_ids.tolist()


def test_epoch_segment_lane_window_and_seed_each_give_another_order(reader):
    keys = [WindowKey(0, 0, 0, 0)]
    keys += [replace(keys[0], **{name: 1}) for name in ("epoch", "segment", "lane", "window")]
    orders = [tuple(builder(reader).build(request(*SLICES, key=key)).row_ids) for key in keys]
    orders.append(tuple(builder(reader, seed=2).build(request(*SLICES)).row_ids))
    assert len(set(orders)) == len(keys) + 1
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_micro_batches_come_in_an_order_that_does_not_follow_their_lengths(reader):
    lengths = [shape.target_length for shape in builder(reader).build(request(*SLICES)).shapes]
    assert len(lengths) > 5
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def test_validation_is_every_row_once_a_window_for_each_row_group(reader):
    groups = list(reader.read_split("validation"))
    windows = [builder(reader).build_rows(rows) for rows in groups]
    assert [sorted(unpadded(window)) for window in windows] == [sorted(as_lists(rows)) for rows in groups]


def test_a_window_without_rows_has_no_micro_batch(reader):
    window = builder(reader).build(request())
    assert (window.shapes, len(window.tokens), len(window.row_ids)) == ((), 0, 0)


def test_a_window_names_the_row_groups_that_it_goes_without(tmp_path):
    reader = reader_of(
        tmp_path, {"train": write_token_split(tmp_path, "train", ((30, 30),))}, on_bad_row_group="quarantine"
    )
    window = builder(reader).build(request((0, 0, 0, 30), (0, 1, 0, 30), quarantined=((0, 1),)))
    assert [(group.corpus, group.row_group) for group in window.quarantined] == [(0, 1)]
    assert len(window.row_ids) == 30


def test_a_row_group_that_cannot_be_read_ends_in_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    reader = reader_of(tmp_path, {"train": write_token_split(tmp_path, "train", ((30,),))})
    shard = tmp_path / "shards" / "train-00000.parquet"
    with (
        changed_bytes(shard, 4, 200),
        pytest.raises(DataError, match=r"train-00000.parquet: row group 0 cannot be read"),
    ):
        builder(reader).build(request((0, 0, 0, 30)))
