"""Many files as one corpus; only the wanted batches; what is done to every text; the index of parquet files."""

import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_helpers import FORMATS, HARD_PAIRS, data_in, read_all, write_nested_parquet, write_parquet, write_tsv

from dist_transformer.config.data_schema import CorpusConfig, FilterConfig
from dist_transformer.data.filters import Cleaner
from dist_transformer.data.sources.corpus import parquet_index, read_corpus, scan_corpus
from dist_transformer.data.sources.remote import open_parquet
from dist_transformer.data.sources.text import text_column
from dist_transformer.errors import DataError


def is_among(wanted: set[int], asked: list[int], first_row: int) -> bool:
    asked.append(first_row)
    return first_row in wanted


@pytest.mark.parametrize("kind", [*FORMATS, "aligned", "named.tsv"])
def test_files_of_a_pattern_are_one_corpus(tmp_path: Path, kind: str):
    pairs = [(f"s {n}", f"t {n}") for n in range(100)]
    corpus = CorpusConfig(path=f"part-*.{kind}")
    for number, (first, last) in enumerate([(0, 30), (30, 30), (30, 31), (31, 100)]):
        part, path = pairs[first:last], tmp_path / f"part-{number}.{kind}"
        if kind == "aligned":
            corpus = CorpusConfig(source="part-*.en", target="part-?.de")
            for language, side in (("en", 0), ("de", 1)):
                path.with_suffix(f".{language}").write_text("".join(f"{pair[side]}\n" for pair in part))
        elif kind == "named.tsv":
            corpus = CorpusConfig(path="part-*.named.tsv", columns=("source", "target"))
            write_tsv(path, [("source", "target"), *part], "")
        else:
            FORMATS[kind](path, part, "")
    data = data_in(tmp_path, corpus)
    assert read_all(corpus, data) == pairs
    assert scan_corpus(corpus, data) == 100
    assert [len(batch.source) for batch in read_corpus(corpus, data, 32)] == [32, 32, 32, 4]


@pytest.mark.parametrize("kind", [*FORMATS, "hub"])
def test_the_wanted_batches_alone_come_as_they_do_among_all(tmp_path: Path, kind: str):
    pairs = [(f"s {n}", f"t {n}") for n in range(200)]
    corpus = CorpusConfig(path=f"part-*.{kind}")
    if kind == "hub":
        write_parquet(tmp_path / "train.parquet", pairs, "")
        corpus = CorpusConfig(hub=str(tmp_path))
    else:
        for number, (first, last) in enumerate([(0, 90), (90, 91), (91, 200)]):
            FORMATS[kind](tmp_path / f"part-{number}.{kind}", pairs[first:last], "")
    data = data_in(tmp_path, corpus)
    whole = list(read_corpus(corpus, data, 8))
    for wanted in ({0}, {40, 48, 96, 192}, {88}, {16, 80, 104}, set()):
        asked: list[int] = []
        found = list(read_corpus(corpus, data, 8, partial(is_among, wanted, asked)))
        assert found == [batch for batch in whole if batch.first_row in wanted]
        assert asked == [batch.first_row for batch in whole]


def test_lines_of_unwanted_rows_are_not_parsed(tmp_path: Path):
    row = b'{"en": "a", "de": "b"}\n'
    (tmp_path / "t.jsonl").write_bytes(row + b"no json \xff\n" * 7 + row * 8)
    corpus = CorpusConfig(path="t.jsonl")
    (batch,) = read_corpus(corpus, data_in(tmp_path, corpus), 8, lambda row: row == 8)
    assert batch.source == ["a"] * 8


def test_the_first_row_of_a_jsonl_file_decides_on_the_columns_whichever_rows_are_wanted(tmp_path: Path):
    rows = ['{"en": "a", "de": "b"}', "", '{"en": "c"}', '{"translation": {"en": "d", "de": "e"}}']
    (tmp_path / "t.jsonl").write_text("".join(f"{row}\n" for row in rows))
    corpus = CorpusConfig(path="t.jsonl")
    whole = list(read_corpus(corpus, data_in(tmp_path, corpus), 1))
    assert [(batch.source, batch.target) for batch in whole] == [
        (["a"], ["b"]),
        ([None], [None]),
        (["c"], [None]),
        ([None], [None]),
    ]
    for number in range(4):
        assert list(read_corpus(corpus, data_in(tmp_path, corpus), 1, lambda row, n=number: row == n)) == [
            whole[number]
        ]


@pytest.mark.parametrize("is_hub", [False, True])
def test_row_groups_of_parquet_without_a_wanted_row_are_not_read(tmp_path: Path, is_hub: bool):
    path = tmp_path / "train.parquet"
    texts = [f"{number}" for number in range(60)]
    pq.write_table(pa.table({"en": texts, "de": texts}), path, row_group_size=20)
    metadata = pq.ParquetFile(path).metadata
    content = bytearray(path.read_bytes())
    for group in (0, 2):
        begin = metadata.row_group(group).column(0).dictionary_page_offset
        content[begin : begin + 30] = bytes(30)
    path.write_bytes(content)
    corpus = CorpusConfig(hub=str(tmp_path)) if is_hub else CorpusConfig(path="train.parquet")
    batches = read_corpus(corpus, data_in(tmp_path, corpus), 4, lambda row: 24 <= row < 36)
    assert [text for batch in batches for text in batch.source] == texts[24:36]
    with pytest.raises(DataError, match="cannot be read"):
        list(read_corpus(corpus, data_in(tmp_path, corpus), 4, lambda row: row == 16))


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_both_sides_are_normalized_and_source_sentences_are_tagged_afterwards(tmp_path: Path, form: str):
    texts = ["ﬁne ①", "e\u0301", "", " \u00a0 ", "ein Ångström: \u212b"]
    (tmp_path / "t.tsv").write_text("".join(f"{text}\t{text}\n" for text in texts))
    corpus = CorpusConfig(path="t.tsv", tags=("<2de>", "<①>"))
    (batch,) = read_corpus(corpus, data_in(tmp_path, corpus, normalization=form), 8)
    assert batch.target == [unicodedata.normalize(form, text) for text in texts]
    # A blank sentence stays blank, so that it is dropped as one.
    assert batch.source == [f"<2de> <①> {text}" if text.strip() else text for text in batch.target]
    assert batch.prefix == "<2de> <①> "


def test_identical_sides_are_found_behind_the_tags(tmp_path: Path):
    (tmp_path / "t.tsv").write_text("same\tsame\none\teins\n \tleer\n")
    corpus = CorpusConfig(path="t.tsv", tags=("<2de>",))
    (batch,) = read_corpus(corpus, data_in(tmp_path, corpus), 8)
    text = Cleaner(FilterConfig(drop_identical=True), ("en", "de")).clean(batch)
    assert (text.positions.tolist(), text.dropped) == ([1], {"identical": [0], "empty": [2]})


@pytest.mark.parametrize("write", [write_parquet, write_nested_parquet])
def test_an_index_tells_row_groups_and_columns_of_parquet_files_alone(
    tmp_path: Path, write: Callable[[Path, list[tuple[str, str]], str], None]
):
    write(tmp_path / "b.parquet", HARD_PAIRS, "")
    write(tmp_path / "a.parquet", HARD_PAIRS[:25], "")
    corpus = CorpusConfig(path="*.parquet")
    data = data_in(tmp_path, corpus)
    first, second = parquet_index(corpus, data)
    assert (first.file, second.file) == (str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    assert (first.rows, second.rows) == ((20, 5), (20, 20, 18))
    assert first.bytes == (tmp_path / "a.parquet").stat().st_size
    assert first.fingerprint != second.fingerprint
    texts = [
        text_column(open_parquet(file.file).read_row_group(group, columns=[file.source]), file.source).to_pylist()
        for file in (first, second)
        for group in range(len(file.rows))
    ]
    sources = [text for batch in read_corpus(corpus, data, 20) for text in batch.source]
    assert [text for group in texts for text in group] == sources
    write_tsv(tmp_path / "c.tsv", HARD_PAIRS, "")
    for other in (CorpusConfig(path="c.tsv"), CorpusConfig(demo="train"), CorpusConfig(source="c.tsv", target="c.tsv")):
        assert parquet_index(other, data_in(tmp_path, other)) is None


def test_a_dataset_of_parquet_files_has_an_index_too(tmp_path: Path):
    write_nested_parquet(tmp_path / "train-0.parquet", HARD_PAIRS, "")
    write_nested_parquet(tmp_path / "train-1.parquet", HARD_PAIRS[:3], "")
    write_nested_parquet(tmp_path / "validation-0.parquet", HARD_PAIRS[:2], "")
    corpus = CorpusConfig(hub=str(tmp_path))
    index = parquet_index(corpus, data_in(tmp_path, corpus))
    assert [(Path(file.file).name, file.rows) for file in index] == [
        ("train-0.parquet", (20, 20, 18)),
        ("train-1.parquet", (3,)),
    ]
    assert parquet_index(CorpusConfig(hub=str(tmp_path), split="train[:1]"), data_in(tmp_path, corpus)) is None
