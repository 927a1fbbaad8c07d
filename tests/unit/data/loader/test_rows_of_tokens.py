"""Rows of token shards: exactly those that the slices name."""

import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_helpers import as_lists, manifest_of, reader_of, request, write_token_split

from dist_transformer.config.schema import Config
from dist_transformer.data.loader import row_groups
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.window_request import CORPUS_SHIFT
from dist_transformer.data.manifest import RowGroup, Shard, Split
from dist_transformer.training.run_data import row_groups_warning

FILES = {"news": ((5, 7), (3,), (8, 8, 1)), "talks": ((6,), (4, 9)), "validation": ((4, 2), (5,))}
GROUPS = [(corpus, name, group) for corpus, name in enumerate(("news", "talks")) for group in range(6 - 3 * corpus)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def splits(folder: Path) -> dict[str, Split]:
    return {name: write_token_split(folder, name, files) for name, files in FILES.items()}


@pytest.fixture(scope="module")
def reader(folder: Path, splits: dict[str, Split]) -> RowReader:
    return reader_of(folder, splits)


def rows_of_groups(folder: Path, split: Split) -> list[list[tuple[int, list[int], list[int]]]]:
    """The rows of each row group, as pyarrow gives them."""
    groups = []
    for shard in split.shards:
        file = pq.ParquetFile(folder / shard.file)
        for index in range(file.num_row_groups):
            groups.append([tuple(row.values()) for row in file.read_row_group(index).to_pylist()])
    return groups


@st.composite
def slices(draw: st.DrawFn) -> tuple[int, int, int, int]:
    corpus, name, group = draw(st.sampled_from(GROUPS))
    rows = [rows for file in FILES[name] for rows in file][group]
    first = draw(st.integers(0, rows - 1))
    return corpus, group, first, draw(st.integers(first + 1, rows))


@settings(max_examples=40, deadline=None)
@given(st.lists(slices(), min_size=1, max_size=8))
def test_any_slices_give_exactly_their_rows_in_their_order(folder, splits, reader, pieces):
    groups = [rows_of_groups(folder, splits[name]) for name in ("news", "talks")]
    expected = [
        ((corpus << CORPUS_SHIFT) + row_id, source, target)
        for corpus, group, first, last in pieces
        for row_id, source, target in groups[corpus][group][first:last]
    ]
    read = reader.read(request(*pieces))
    assert as_lists(read) == expected
    assert (read.dropped, read.quarantined) == ({}, ())


def test_a_split_is_read_row_group_by_row_group_in_order(folder, splits, reader):
    assert [as_lists(rows) for rows in reader.read_split("validation")] == rows_of_groups(folder, splits["validation"])


class OneByOne(tuple[RowGroup, ...]):
    """Row groups of which each is had, but no range: files may have a hundred thousand."""

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, int)
        return super().__getitem__(index)


def test_the_first_row_of_a_row_group_is_the_sum_of_those_before_and_found_without_adding_them():
    files = ((5, 0, 7), (), (3,), (8, 1))
    shards = tuple(Shard("a", 1, "", OneByOne(RowGroup(rows, 0, 0) for rows in file)) for file in files)
    places = row_groups.SplitPlaces(Path(), Split(shards, 24, 0, 0, 0, 0, 24, {}, None))
    found = [places[number] for number in range(len(places))]
    assert [place.rows for place in found] == [5, 0, 7, 3, 8, 1]
    assert [place.first_row for place in found] == [0, 5, 5, 12, 15, 23]
    assert [place.index for place in found] == [0, 1, 2, 0, 0, 1]


def test_a_split_with_an_empty_row_group_is_read(tmp_path):
    splits = {"validation": write_token_split(tmp_path, "validation", [[2, 0, 3]])}
    read = [as_lists(rows) for rows in reader_of(tmp_path, splits).read_split("validation")]
    assert [len(rows) for rows in read] == [2, 3]


def test_a_reader_that_has_read_can_be_sent_to_another_process(reader):
    window = request((0, 1, 2, 5), (1, 2, 0, 9))
    before = as_lists(reader.read(window))
    assert as_lists(pickle.loads(pickle.dumps(reader)).read(window)) == before


def test_more_files_than_are_kept_open_can_be_read(tmp_path):
    split = write_token_split(tmp_path, "train", [(2,)] * 70)
    reader = reader_of(tmp_path, {"train": split})
    read = reader.read(request(*((0, group, 0, 2) for group in [*range(70), 0])))
    assert as_lists(read) == [row for group in rows_of_groups(tmp_path, split) for row in group] + as_lists(
        reader.read(request((0, 0, 0, 2)))
    )


def test_the_rows_of_a_window_that_is_left_out_whole_are_none(reader):
    read = reader.read(request((0, 1, 2, 5), (1, 2, 0, 9), quarantined=((0, 1), (1, 2))))
    assert as_lists(read) == []
    assert [len(side.ids) for side in (read.source, read.target)] == [0, 0]
    assert [(lost.corpus, lost.row_group, lost.reason) for lost in read.quarantined] == [
        (0, 1, "quarantined before"),
        (1, 2, "quarantined before"),
    ]


def test_a_file_of_each_corpus_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    many = row_groups.OPEN_FILES + 5
    each = {f"corpus{number}": write_token_split(tmp_path, f"corpus{number}", [(4,)]) for number in range(many)}
    reader, opened = pickle.loads(pickle.dumps(reader_of(tmp_path, each))), list[str]()
    opens = row_groups.open_parquet
    monkeypatch.setattr(row_groups, "open_parquet", lambda name: (opened.append(name), opens(name))[1])
    for first in range(4):
        reader.read(request(*((corpus, 0, first, first + 1) for corpus in range(many))))
    assert len(opened) == many


@pytest.mark.parametrize(("window_rows", "group_rows"), [(9, 45), (10, 0)])
def test_windows_that_read_far_more_rows_than_they_take_are_told_with_what_helps(window_rows: int, group_rows: int):
    group = Split((Shard("one", 1, "", (RowGroup(50, 0, 0), RowGroup(7, 0, 0))),), 57, 0, 0, 0, 0, 57, {}, None)
    manifest = manifest_of({"news": group, "talks": group})
    said = row_groups_warning(Config(data={"train": {"demo": "train"}, "window_rows": window_rows}), manifest)
    assert bool(said) == bool(group_rows)
    if said:
        assert "a window of 9 rows reads row groups of 100 rows" in said
        assert said.endswith(f"data.window_rows of 10, or prepare with data.row_group_rows of {group_rows}")
