"""Every format gives the same rows as plain aligned text, whatever hard characters they hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from source_helpers import (
    HARD_PAIRS,
    data_in,
    pack,
    read_all,
    write_arrow_file,
    write_arrow_stream,
    write_csv,
    write_jsonl,
    write_nested_jsonl,
    write_nested_parquet,
    write_parquet,
    write_tsv,
)

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.data.sources.corpus import read_corpus, scan_corpus
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.sources.files import COMPRESSIONS, corpus_fingerprint, find_corpus_files
from dist_transformer.errors import DataError


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_aligned_text_is_cut_at_line_feeds_and_nowhere_else(tmp_path: Path, suffix: str, line_end: str):
    for name, side in (("text.en", 0), ("text.de", 1)):
        text = "".join(pair[side] + line_end for pair in HARD_PAIRS)
        (tmp_path / f"{name}{suffix}").write_bytes(pack(text.removesuffix(line_end), suffix))
    corpus = CorpusConfig(source=f"text.en{suffix}", target=f"text.de{suffix}")
    data = data_in(tmp_path, corpus)
    assert scan_corpus(corpus, data) == len(HARD_PAIRS)
    assert read_all(corpus, data) == HARD_PAIRS


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
@pytest.mark.parametrize(
    ("name", "write"),
    [("t.tsv", write_tsv), ("t.csv", write_csv), ("t.jsonl", write_jsonl), ("n.jsonl", write_nested_jsonl)],
)
def test_tables_give_the_rows_of_plain_text(
    tmp_path: Path, name: str, write: Callable[[Path, list[tuple[str, str]], str], None], suffix: str
):
    write(tmp_path / f"{name}{suffix}", HARD_PAIRS, suffix)
    corpus = CorpusConfig(path=f"{name}{suffix}")
    assert read_all(corpus, data_in(tmp_path, corpus)) == HARD_PAIRS


def test_the_header_of_a_csv_is_its_first_line_that_is_not_blank(tmp_path: Path):
    (tmp_path / "t.csv").write_text("\n\r\nen,de\nhello,hallo\n")
    corpus = CorpusConfig(path="t.csv")
    assert read_all(corpus, data_in(tmp_path, corpus)) == [("hello", "hallo")]


def test_a_cell_of_a_csv_may_be_long(tmp_path: Path):
    write_csv(tmp_path / "t.csv", [("a" * 200_000, "hallo")], "")
    corpus = CorpusConfig(path="t.csv")
    assert read_all(corpus, data_in(tmp_path, corpus)) == [("a" * 200_000, "hallo")]


@pytest.mark.parametrize("write", [write_parquet, write_nested_parquet])
def test_parquet_gives_the_rows_of_plain_text_flat_and_nested(
    tmp_path: Path, write: Callable[[Path, list[tuple[str, str]], str], None]
):
    write(tmp_path / "t.parquet", HARD_PAIRS, "")
    corpus = CorpusConfig(path="t.parquet")
    data = data_in(tmp_path, corpus)
    assert scan_corpus(corpus, data) == len(HARD_PAIRS)
    assert read_all(corpus, data) == HARD_PAIRS


@pytest.mark.parametrize("write", [write_arrow_stream, write_arrow_file])
def test_both_kinds_of_arrow_files_give_the_rows_of_plain_text(
    tmp_path: Path, write: Callable[[Path, list[tuple[str, str]], str], None]
):
    write(tmp_path / "t.arrow", HARD_PAIRS, "")
    corpus = CorpusConfig(path="t.arrow")
    data = data_in(tmp_path, corpus)
    assert scan_corpus(corpus, data) == len(HARD_PAIRS)
    assert read_all(corpus, data) == HARD_PAIRS


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), "dictionary"])
def test_every_arrow_type_of_text_is_text(tmp_path: Path, kind: pa.DataType | str):
    texts = pa.array(["eins", None, "zwei", "eins"])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    table = pa.table({"en": column, "de": column})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    corpus = CorpusConfig(path="t.arrow")
    assert read_all(corpus, data_in(tmp_path, corpus)) == [(text, text) for text in texts.to_pylist()]


def test_a_dataset_folder_is_read_through_the_hub_door(tmp_path: Path):
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    write_nested_parquet(folder / "data" / "train-00000-of-00001.parquet", HARD_PAIRS, "")
    write_nested_parquet(folder / "data" / "validation-00000-of-00001.parquet", HARD_PAIRS[:3], "")
    for split, expected in (("train", HARD_PAIRS), ("validation", HARD_PAIRS[:3])):
        corpus = CorpusConfig(hub=str(folder), split=split)
        data = data_in(tmp_path, corpus)
        assert scan_corpus(corpus, data) == len(expected)
        assert read_all(corpus, data) == expected


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("has_types", [False, True])
def test_every_cell_of_a_csv_dataset_is_text(tmp_path: Path, suffix: str, has_types: bool):
    texts = ["NA", "null", "None", "nan", "n/a", "", "True", "2020-01-01", " spaces "]
    pairs = [*((text, f"Wort {text}") for text in texts), *((f"{n:06}", str(n)) for n in range(25_000))]
    columns = {
        "en": [en for en, _ in pairs],
        "de": [de for _, de in pairs],
        "score": [None, *([0.5] * (len(pairs) - 1))],
    }
    pd.DataFrame(columns).to_csv(tmp_path / f"train.{suffix}", sep="," if suffix == "csv" else "\t", index=False)
    if has_types:
        types = "".join(f"\n  - name: {name}\n    dtype: string" for name in ("en", "de"))
        card = f"---\ndataset_info:\n  features:\n  - name: score\n    dtype: float64{types}\n---\n"
        (tmp_path / "README.md").write_text(card)
    corpus = CorpusConfig(hub=str(tmp_path))
    data = data_in(tmp_path, corpus)
    assert read_all(corpus, data, 4096) == pairs


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        (["en,de", "1,NA,nein", "2,Hello,Hallo"], {}, [("NA", "nein"), ("Hello", "Hallo")]),  # as R writes it
        (["en,de", "a,b", "one, two,eins", "NA,d"], {"on_bad_lines": "skip"}, [("a", "b"), ("NA", "d")]),
        (["NA,nein", "07,sieben"], {"header": None, "columns": ("0", "1")}, [("NA", "nein"), ("07", "sieben")]),
    ],
    ids=["numbered rows", "bad lines", "no header"],
)
def test_the_rows_of_a_csv_dataset_are_those_that_pandas_finds(
    tmp_path: Path, rows: list[str], settings: dict[str, Any], expected: list[tuple[str, str]]
):
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    columns = settings.pop("columns", None)
    card = {"configs": [{"config_name": "default", "data_files": "train.csv", **settings}]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    corpus = CorpusConfig(hub=str(tmp_path), columns=columns)
    assert read_all(corpus, data_in(tmp_path, corpus)) == expected


def test_a_late_row_of_a_csv_dataset_with_a_cell_too_many_is_refused(tmp_path: Path):
    (tmp_path / "train.csv").write_text("en,de\n" + "a,b\n" * 20_000 + "Hello, world,Hallo Welt\n")
    corpus = CorpusConfig(hub=str(tmp_path))
    with pytest.raises(DataError, match=r"cannot be read: .*Expected 2 fields in line 20002, saw 3"):
        read_all(corpus, data_in(tmp_path, corpus))


def test_scores_of_a_csv_dataset_are_numbers_or_missing(tmp_path: Path):
    (tmp_path / "train.csv").write_text("en,de,score\nNA,NA,0.5\nnull,None,NA\n7,8,\n")
    corpus = CorpusConfig(hub=str(tmp_path))
    (batch,) = read_corpus(corpus, data_in(tmp_path, corpus), 8, scores=["score"])
    assert [*zip(batch.source, batch.target, strict=True)] == [("NA", "NA"), ("null", "None"), ("7", "8")]
    assert np.array_equal(batch.scores["score"], [0.5, np.nan, np.nan], equal_nan=True)


def test_a_column_that_another_file_of_a_csv_dataset_lacks_is_named(tmp_path: Path):
    for number, columns in enumerate(("de,en,id", "en,fr")):
        (tmp_path / f"train-{number}.csv").write_text(f"{columns}\n{columns}\n")
    corpus = CorpusConfig(hub=str(tmp_path))
    with pytest.raises(DataError, match=r"\(train\): cannot be read: .*different: de: .* vs en: .* fr: "):
        read_all(corpus, data_in(tmp_path, corpus))


def test_batches_stay_full_across_the_blocks_of_a_reader(tmp_path: Path):
    pairs = [(f"s {n}", f"t {n}") for n in range(25_000)]
    write_csv(tmp_path / "t.csv", pairs, "")
    corpus = CorpusConfig(path="t.csv")
    batches = list(read_corpus(corpus, data_in(tmp_path, corpus), 4096))
    assert [len(batch.source) for batch in batches[:-1]] == [4096] * (len(batches) - 1)
    assert [text for batch in batches for text in batch.target] == [target for _, target in pairs]


@pytest.mark.parametrize("columns", [("2", "0"), ("deutsch", "id")])
def test_columns_of_a_tsv_are_chosen_by_number_or_by_header(tmp_path: Path, columns: tuple[str, str]):
    header = [] if columns[0].isdecimal() else ["id\ten\tdeutsch"]
    (tmp_path / "t.tsv").write_bytes("\r\n".join([*header, "7\thello\thallo", "8\tbye"]).encode())
    corpus = CorpusConfig(path="t.tsv", columns=columns)
    assert read_all(corpus, data_in(tmp_path, corpus)) == [("hallo", "7"), (None, "8")]


def test_columns_of_a_table_are_chosen_by_name_and_by_dots(tmp_path: Path):
    write_nested_parquet(tmp_path / "t.parquet", HARD_PAIRS, "")
    corpus = CorpusConfig(path="t.parquet", columns=("translation.de", "translation.en"))
    assert read_all(corpus, data_in(tmp_path, corpus)) == [(target, source) for source, target in HARD_PAIRS]


def test_names_with_pattern_characters_are_plain_names(tmp_path: Path):
    write_csv(tmp_path / "a[1]*.csv", HARD_PAIRS, "")
    corpus = CorpusConfig(path="a[1]*.csv")
    assert read_all(corpus, data_in(tmp_path, corpus)) == HARD_PAIRS


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfhello\n")
    (tmp_path / "b").write_bytes(b"hallo\n")
    corpus = CorpusConfig(source="a", target="b")
    assert read_all(corpus, data_in(tmp_path, corpus)) == [("hello", "hallo")]


def test_the_demonstration_corpus_needs_no_files(tmp_path: Path):
    corpus = CorpusConfig(demo="validation")
    data = data_in(tmp_path, corpus)
    assert read_all(corpus, data, 64) == list(demo_pairs("validation"))
    assert scan_corpus(corpus, data) == 500
    assert find_corpus_files(corpus, data).every() == ()


def test_a_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path):
    prints = []
    for folder, text in (("a", "x\ty\n"), ("b", "x\ty\n"), ("c", "x\tz\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.tsv").write_text(text)
        corpus = CorpusConfig(path="t.tsv")
        prints.append(corpus_fingerprint(corpus, data_in(tmp_path / folder, corpus)))
    assert prints[0] == prints[1] != prints[2]
    hub = [CorpusConfig(hub="wmt/wmt14", revision=revision) for revision in ("a", "b")]
    assert corpus_fingerprint(hub[0], data_in(tmp_path, hub[0])) != corpus_fingerprint(
        hub[1], data_in(tmp_path, hub[1])
    )


def test_an_unknown_kind_of_file_is_refused_with_the_known_ones(tmp_path: Path):
    (tmp_path / "t.xml").write_text("x")
    corpus = CorpusConfig(path="t.xml")
    with pytest.raises(DataError, match=r"cannot tell the format of 't.xml'; expected .* \.tsv, \.csv, \.jsonl"):
        list(read_corpus(corpus, data_in(tmp_path, corpus), 8))
