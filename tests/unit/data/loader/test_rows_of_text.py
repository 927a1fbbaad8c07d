"""Rows of text, tokenized in the loader: what `prepare` makes of them, and samples that repeat."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rows_helpers import (
    KEY,
    PAIRS,
    TOKENIZER,
    as_lists,
    changed_bytes,
    reader_of,
    request,
    split_of,
    write_table,
    write_text_split,
    write_tokenizer,
)

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import Cleaner, filter_lengths
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.token_rows import TokenRows
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, WindowKey, WindowRequest
from dist_transformer.data.manifest import Shard, Split, TextColumns
from dist_transformer.data.modifiers import INLINE_TAGS
from dist_transformer.data.prepare.preparation import prepare
from dist_transformer.data.recipe import make_recipe
from dist_transformer.data.sources import retries
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.tokenizer.tokenizer import Tokenizer

GROUPS = (40, 50, 30)
FILTERS = {"max_tokens": 60, "max_length_ratio": 1.5}
WHOLE = tuple((0, group, 0, rows) for group, rows in enumerate(GROUPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a tokenizer, and beside it a parquet file of `PAIRS`."""
    folder = tmp_path_factory.mktemp("texts")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def split(folder: Path) -> Split:
    return write_text_split(folder / "user" / "corpus.parquet", GROUPS)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / TOKENIZER)


def in_place(path: Path, table: pa.Table, columns: TextColumns) -> Split:
    """A split of one file of one row group."""
    groups = write_table(table, path, [table.num_rows])
    return split_of([Shard(str(path), path.stat().st_size, "", groups)], columns)


def read_all(folder: Path, split: Split, **settings: Any) -> TokenRows:
    """The whole of the only row group of a split."""
    return reader_of(folder, {"train": split}, **settings).read(request((0, 0, 0, split.rows)))


def test_rows_are_filtered_and_tokenized_as_by_prepare_and_numbered_by_their_place(folder, split, tokenizer):
    filters = FilterConfig(**FILTERS)
    source, target = [source for source, _ in PAIRS], [target for _, target in PAIRS]
    ids = (tokenizer.encode_source(source), tokenizer.encode_target(target))
    text = Cleaner(filters, ("en", "de")).clean(RawBatch(0, source, target))
    assert len(text.source) == len(PAIRS)
    text = text.without(filter_lengths(*([len(row) for row in side] for side in ids), filters))
    assert len(PAIRS) > len(text.source) > len(PAIRS) / 2
    read = reader_of(folder, {"train": split}, filters=FILTERS).read(request(*WHOLE))
    assert as_lists(read) == [(row, ids[0][row], ids[1][row]) for row in text.positions]
    assert read.dropped == dict(text.counts())


def test_any_cut_of_a_window_gives_the_same_rows(folder, split):
    reader = reader_of(folder, {"train": split}, filters=FILTERS)
    pieces = request((0, 0, 0, 7), (0, 0, 7, 40), (0, 1, 0, 50), (0, 2, 0, 1), (0, 2, 1, 30))
    assert as_lists(reader.read(pieces)) == as_lists(reader.read(request(*WHOLE)))


def test_shards_of_text_in_the_prepared_folder_keep_their_row_numbers_and_are_not_tagged_again(folder, tokenizer):
    table = pa.table({"row_id": [70, 3], "source": ["<2de> A dog.", "<2de> ﬁ"], "target": ["Ein Hund.", "ﬁ"]})
    path = folder / "shards/train-00000.parquet"
    groups = write_table(table, path, [2])
    columns = TextColumns("source", "target", "")
    text = split_of([Shard(f"shards/{path.name}", path.stat().st_size, "", groups)], columns)
    read = reader_of(folder, {"news": text, "talks": text}, normalization="NFKC").read(request((1, 0, 0, 2)))
    first = 1 << CORPUS_SHIFT
    source = tokenizer.encode_source(["<2de> A dog.", "<2de> ﬁ"])
    target = tokenizer.encode_target(["Ein Hund.", "ﬁ"])
    assert as_lists(read) == [(first + 70, source[0], target[0]), (first + 3, source[1], target[1])]


def test_nested_columns_in_place_are_normalized_and_tagged(folder, tokenizer):
    rows = [{"en": "Cafe\u0301", "de": "Kaffee"}, {"en": "", "de": "nichts"}, {"en": None, "de": "nichts"}]
    split = in_place(
        folder / "user/nested.parquet",
        pa.table({"translation": rows}),
        TextColumns("translation.en", "translation.de", "<2de> "),
    )
    read = read_all(folder, split, normalization="NFC")
    assert as_lists(read) == [(0, *tokenizer.encode_source(["<2de> Caf\u00e9"]), *tokenizer.encode_target(["Kaffee"]))]
    assert read.dropped == {"empty": 2}


def test_bad_encoding_is_dropped_and_counted_where_the_configuration_says_so(folder):
    lines = pa.array([b"good", b"bad \xff", b"a real \xef\xbf\xbd"]).cast(pa.binary())
    text = pa.StringArray.from_buffers(3, *lines.buffers()[1:])
    table = pa.table({"en": text, "de": ["gut", "schlecht", "echt"]})
    split = in_place(folder / "user/bad.parquet", table, TextColumns("en", "de", ""))
    read = read_all(folder, split, filters={"bad_encoding": "drop"})
    assert [row for row, _, _ in as_lists(read)] == [0, 2]
    assert read.dropped == {"bad_encoding": 1}


def at(**key: int) -> WindowRequest:
    return request(*WHOLE, key=replace(KEY, **key))


def read_in_another_process(reader: RowReader, windows: list[WindowRequest]) -> list[TokenRows]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return list(pool.map(reader.read, windows))


@pytest.fixture(scope="module")
def sampling(folder: Path, split: Split) -> RowReader:
    return reader_of(folder, {"train": split}, sampling=0.2)


def test_sampling_differs_from_window_to_window_but_always_spells_the_same_text(sampling, tokenizer):
    keys: list[WindowKey] = [replace(KEY, **{name: 1}) for name in ("epoch", "segment", "lane", "window")]
    windows = [as_lists(sampling.read(request(*WHOLE, key=key))) for key in (KEY, *keys)]
    assert all(first != second for i, first in enumerate(windows) for second in windows[:i])
    for window in windows:
        assert [tokenizer.decode_source(source) for _, source, _ in window] == [source for source, _ in PAIRS]
        assert [tokenizer.decode_target(target) for _, _, target in window] == [target for _, target in PAIRS]


def test_a_sampled_window_is_the_same_whatever_was_read_before_and_in_any_process(sampling):
    first, second = as_lists(sampling.read(at())), as_lists(sampling.read(at(epoch=1)))
    elsewhere = read_in_another_process(sampling, [at(epoch=1), at(epoch=7), at()])
    assert [as_lists(read) for read in elsewhere[::2]] == [second, first]


def test_a_sampled_window_without_a_row_group_is_the_one_in_which_it_was_lost(folder, split, tmp_path, monkeypatch):
    """So that a run that goes on after the file was mended trains on what it would have trained on."""
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    copy = write_text_split(tmp_path / "corpus.parquet", GROUPS)
    (shard,) = copy.shards
    settings = {"on_bad_row_group": "quarantine"}
    reader = reader_of(folder, {"train": copy}, sampling=0.2, **settings)
    with changed_bytes(Path(shard.file), 30, 60):
        lost = reader.read(at())
    assert [(group.row_group, len(lost.row_ids)) for group in lost.quarantined] == [(0, 80)]
    mended = reader_of(folder, {"train": copy}, sampling=0.2, **settings).read(replace(at(), quarantined=((0, 0),)))
    assert as_lists(mended) == as_lists(lost)


def test_rows_are_modified_after_the_filters_by_row_and_pass_whatever_the_window(folder, split, tokenizer, monkeypatch):
    reader = reader_of(folder, {"train": split}, on_the_fly=True, modifiers={"upper_case": 0.5}, filters=FILTERS)
    first = as_lists(reader.read(at()))
    targets = [target for _, target in PAIRS]
    plain, upper = tokenizer.encode_target(targets), tokenizer.encode_target([target.upper() for target in targets])
    assert all(ids in (plain[row], upper[row]) for row, _, ids in first)
    assert 0.1 < sum(ids == upper[row] for row, _, ids in first) / len(first) < 0.7
    (elsewhere,) = read_in_another_process(reader, [at(epoch=1, lane=3, window=7)])
    assert as_lists(elsewhere) == first
    again = request(*((*piece, 1) for piece in WHOLE))
    assert as_lists(reader.read(again)) != first
    monkeypatch.setattr("dist_transformer.data.loader.rows.ROWS_AT_ONCE", 7)
    read = [as_lists(rows) for rows in reader.read_first_pass(0)]
    assert [row for rows in read for row in rows] == first
    assert max(map(len, read)) <= 7


def all_rows(config: Config, folder: Path) -> tuple[list[tuple[int, list[int], list[int]]], dict[str, int]]:
    """Every training row of a corpus that is really prepared, by row id; and what was dropped on the way."""
    manifest = prepare(config, folder)
    groups = enumerate(manifest.splits["train"].row_groups)
    reader = RowReader(folder, manifest, config.data, 0.0, seed=1)
    read = reader.read(request(*((0, number, 0, group.rows) for number, group in groups)))
    dropped = Counter(manifest.splits["train"].dropped) + Counter(read.dropped)
    return sorted(as_lists(read)), dict(dropped)


def test_a_tokenizer_that_is_trained_for_inline_tags_keeps_each_as_one_piece_on_both_sides(tmp_path):
    for language, side in (("en", 0), ("de", 1)):
        (tmp_path / f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    corpus = {"source": "train.en", "target": "train.de"}
    data = {"root": str(tmp_path), "train": corpus, "on_the_fly": True, "modifiers": {"tags": 0.1}}
    config = Config.model_validate({"data": data, "tokenizer": {"vocabulary_size": 160, "shared": False}})
    files = prepare(config, tmp_path / "prepared").tokenizer
    tokenizer = Tokenizer.load(tmp_path / "prepared" / files.source, tmp_path / "prepared" / files.target)
    (source,), (target,) = tokenizer.encode_source(["<1>one</1>"]), tokenizer.encode_target(["<1>eins</1>"])
    for pieces in (tokenizer.source_pieces(source), tokenizer.target_pieces(target)):
        assert {"<1>", "</1>"} <= set(pieces)
    assert make_recipe(config)["inline_tags"] == INLINE_TAGS


@pytest.mark.parametrize("kind", ["parquet", "lines"])
def test_tokenizing_on_the_fly_gives_the_rows_that_prepare_writes(tmp_path, kind):
    pairs = [*PAIRS, ("", "nichts"), ("ﬁne words", "ﬁne words"), ("same", "same"), ("a " * 90, "b")]
    sides = {"en": [source for source, _ in pairs], "de": [target for _, target in pairs]}
    write_table(pa.table(sides), tmp_path / "train.parquet", [50, 40, len(pairs) - 90])
    for language, texts in sides.items():
        (tmp_path / f"train.{language}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    corpus = {"path": "train.parquet"} if kind == "parquet" else {"source": "train.en", "target": "train.de"}
    found = []
    for on_the_fly in (False, True):
        data = {
            "root": str(tmp_path), "train": {**corpus, "tags": ["<2de>"]}, "on_the_fly": on_the_fly,
            "normalization": "NFKC", "filters": {"max_tokens": 60, "drop_identical": True}, "row_group_rows": 16,
        }  # fmt: skip
        config = Config.model_validate({"data": data, "tokenizer": {"vocabulary_size": 240}})
        found.append(all_rows(config, tmp_path / f"prepared_{on_the_fly}"))
    assert found[0] == found[1]
    assert found[0][1].keys() == {"empty", "identical", "too_long"}
