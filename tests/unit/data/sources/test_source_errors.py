"""What is wrong with a corpus is said with its file, its line and the numbers."""

import bz2
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_helpers import PACKERS, pack, zipped

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources import lines as files_of_lines
from dist_transformer.data.sources.corpus import RawBatch, parquet_index, read_corpus, scan_corpus
from dist_transformer.data.sources.files import COMPRESSIONS, corpus_fingerprint
from dist_transformer.errors import DataError

GOOD_JSON = b'{"en": "one", "de": "eins"}\n'
ALIGNED = CorpusConfig(source="a.en", target="a.de")


def data_in(folder: Path, corpus: CorpusConfig, bad_encoding: str = "raise") -> DataConfig:
    return DataConfig.model_validate({"root": str(folder), "train": corpus, "filters": {"bad_encoding": bad_encoding}})


def read(folder: Path, corpus: CorpusConfig, bad_encoding: str = "raise") -> list[RawBatch]:
    return list(read_corpus(corpus, data_in(folder, corpus, bad_encoding), 4))


def test_unequal_sides_are_refused_with_both_totals_before_and_while_reading(tmp_path: Path):
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n" * 5)
    (tmp_path / "a.de").write_text("eins\nzwei\n" * 5)
    expected = r"a\.en has 15 lines, but .*a\.de has 10"
    with pytest.raises(DataError, match=expected):
        scan_corpus(ALIGNED, data_in(tmp_path, ALIGNED))
    with pytest.raises(DataError, match=expected):
        read(tmp_path, ALIGNED)


def test_a_last_line_without_line_feed_counts_and_no_line_after_one_does_not(tmp_path: Path):
    (tmp_path / "a.en").write_text("one\ntwo")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    assert scan_corpus(ALIGNED, data_in(tmp_path, ALIGNED)) == 2


@pytest.mark.parametrize("name", ["a.en", "a.de"])
def test_invalid_utf8_is_named_by_file_line_and_byte(tmp_path: Path, name: str):
    for file in ("a.en", "a.de"):
        lines = [b"line %d" % n for n in range(10)]
        if file == name:
            lines[6] = b"caf\xe9 noir"
        (tmp_path / file).write_bytes(b"\n".join(lines))
    expected = rf"{name}:7: not valid UTF-8: byte 0xe9 at byte 4 of the line\..*bad_encoding to drop"
    with pytest.raises(DataError, match=expected):
        scan_corpus(ALIGNED, data_in(tmp_path, ALIGNED))
    with pytest.raises(DataError, match=expected):
        read(tmp_path, ALIGNED)


def test_invalid_utf8_is_marked_where_it_is_to_be_dropped(tmp_path: Path):
    (tmp_path / "a.en").write_bytes(b"one\ncaf\xe9\nthree\nfour\nfive\nsix\n")
    (tmp_path / "a.de").write_bytes(b"eins\nzwei\ndrei\nvier\nf\xfcnf\nsechs\n")
    assert scan_corpus(ALIGNED, data_in(tmp_path, ALIGNED, "drop")) == 6
    batches = read(tmp_path, ALIGNED, "drop")
    assert [batch.first_row + i for batch in batches for i in sorted(batch.bad_encoding)] == [1, 4]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.tsv", b"one\teins\ncaf\xe9\tzwei\nthree\tdrei\n"),
        ("t.csv", b"en,de\none,eins\ncaf\xe9,zwei\nthree,drei\n"),
        ("t.jsonl", b'{"en":"one","de":"eins"}\n{"en":"caf\xe9","de":"zwei"}\n{"en":"three","de":"drei"}\n'),
    ],
)
def test_invalid_utf8_of_a_table_is_named_or_marked(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    corpus = CorpusConfig(path=name)
    line = 3 if name.endswith("csv") else 2
    with pytest.raises(DataError, match=rf"{name}:{line}: not valid UTF-8"):
        scan_corpus(corpus, data_in(tmp_path, corpus))
    (batch,) = read(tmp_path, corpus, "drop")
    assert batch.target == ["eins", "zwei", "drei"]
    assert batch.bad_encoding == {1}


def test_a_missing_file_is_named_with_its_full_path(tmp_path: Path):
    (tmp_path / "a.en").write_text("one\n")
    for act in (lambda: scan_corpus(ALIGNED, data_in(tmp_path, ALIGNED)), lambda: read(tmp_path, ALIGNED)):
        with pytest.raises(DataError, match=rf"{tmp_path}/a\.de: no such file\. .* data\.root"):
            act()
    absolute = CorpusConfig(source=f"{tmp_path}/a.en", target=f"{tmp_path}/a.de")
    with pytest.raises(DataError, match=rf"{tmp_path}/a\.de: no such file\.$"):
        scan_corpus(absolute, data_in(tmp_path, absolute))
    os.mkfifo(tmp_path / "a.de")  # as <(zcat a.gz): read more than once
    with pytest.raises(
        DataError, match=rf"{tmp_path}/a\.de: is a pipe or a folder, expected a file: write it into one"
    ):
        scan_corpus(absolute, data_in(tmp_path, absolute))


@pytest.mark.parametrize(
    ("corpus", "files"),
    [
        (ALIGNED, {"a.en": "", "a.de": ""}),
        (CorpusConfig(path="t.tsv"), {"t.tsv": ""}),
        (CorpusConfig(path="t.csv"), {"t.csv": "en,de\n"}),
        (CorpusConfig(path="t.csv"), {"t.csv": "\n"}),
    ],
)
def test_an_empty_corpus_is_refused(tmp_path: Path, corpus: CorpusConfig, files: dict[str, str]):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=next(iter(files))):
        read(tmp_path, corpus)


def test_a_missing_column_is_named_beside_those_that_exist(tmp_path: Path):
    pq.write_table(pa.table({"id": [1], "translation": [{"en": "one", "fr": "un"}]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"parquet: no column .*'de'; there are id, translation\.en, translation\.fr"):
        read(tmp_path, CorpusConfig(path="t.parquet"))
    with pytest.raises(DataError, match=r"no column 'x' and no column 'y'; there are id"):
        read(tmp_path, CorpusConfig(path="t.parquet", columns=("x", "y")))


def test_a_column_beyond_a_tsv_is_named_beside_those_that_exist(tmp_path: Path):
    (tmp_path / "t.tsv").write_text("only one column\n")
    with pytest.raises(DataError, match=r"t\.tsv: expected columns 0, 1, but the first line has '0'"):
        read(tmp_path, CorpusConfig(path="t.tsv"))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_one_name_are_refused(tmp_path: Path, kind: str):
    table = pa.Table.from_arrays([pa.array(["one"])] * 3, names=["en", "de", "en"])
    if kind == "parquet":
        pq.write_table(table, tmp_path / "t.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
            file.write_table(table)
    with pytest.raises(DataError, match=rf"t\.{kind}: 2 columns are named 'en'; rename them"):
        read(tmp_path, CorpusConfig(path=f"t.{kind}"))


def test_a_table_without_columns_is_refused(tmp_path: Path):
    pq.write_table(pa.table({}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"there are none\. .*e\.g\. columns: \[.source., .target.\]"):
        read(tmp_path, CorpusConfig(path="t.parquet"))


def test_a_column_without_text_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"en": [1, 2], "de": ["eins", "zwei"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: column 'en' holds int64, expected text"):
        read(tmp_path, CorpusConfig(path="t.parquet"))


@pytest.mark.parametrize("packed", [*(PACKERS[suffix] for suffix in COMPRESSIONS), bz2.compress, zipped])
@pytest.mark.parametrize("bad_encoding", ["raise", "drop"])
@pytest.mark.parametrize("name", ["a.en", "a.de", "a.tsv", "a.csv", "a.jsonl"])
def test_compressed_text_under_another_name_is_told(
    tmp_path: Path, name: str, bad_encoding: str, packed: Callable[[bytes], bytes]
):
    for file in ("a.en", "a.de"):
        (tmp_path / file).write_text("one\n" * 99)
    (tmp_path / name).write_bytes(packed(b"en\tde\n" * 99))
    corpus = ALIGNED if name in ("a.en", "a.de") else CorpusConfig(path=name)
    for look in (lambda: scan_corpus(corpus, data_in(tmp_path, corpus, bad_encoding)), lambda: read(tmp_path, corpus)):
        with pytest.raises(
            DataError, match=rf"{name}: compressed, but not named \.gz, \.zst, \.xz, which are read\. Unpack it\."
        ):
            look()


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
@pytest.mark.parametrize("suffix", [*COMPRESSIONS])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str, damage: str):
    whole = pack("".join(f"line {n} {n * 7919}\n" for n in range(5000)), suffix)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    bad = {"cut": whole[:middle], "flipped": flipped, "foreign": b"no archive at all"}[damage]
    (tmp_path / f"t.tsv{suffix}").write_bytes(bad)
    corpus = CorpusConfig(path=f"t.tsv{suffix}")
    with pytest.raises(DataError, match=rf"t\.tsv{suffix}: cannot be read to its end"):
        scan_corpus(corpus, data_in(tmp_path, corpus))


@pytest.mark.parametrize("suffix", [*COMPRESSIONS])
def test_damage_in_a_later_stream_of_a_compressed_file_is_not_taken_for_its_end(tmp_path: Path, suffix: str):
    later = pack("".join(f"source {n * 7919}\ttarget {n}\n" for n in range(1000)), suffix)
    path, corpus = tmp_path / f"t.tsv{suffix}", CorpusConfig(path=f"t.tsv{suffix}")
    padding = bytes(1 << 21) if suffix == ".xz" else b""
    path.write_bytes(later + padding[:4] + later + padding)
    assert sum(len(batch.source) for batch in read(tmp_path, corpus)) == 2000
    for bad in (
        later[:2],
        b"foreign" + later,
        *(later[:at] + bytes([later[at] ^ 64]) + later[at + 1 :] for at in (0, 1)),
    ):
        path.write_bytes(later + padding + bad)
        with pytest.raises(DataError, match=rf"t\.tsv{suffix}: cannot be read to its end"):
            read(tmp_path, corpus)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.parquet", b"no parquet"),
        ("t.parquet", b""),
        ("t.arrow", b"no arrow"),
        ("t.arrow", b"ARROW1 no arrow"),
        ("t.arrow", b""),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: cannot be read"):
        read(tmp_path, CorpusConfig(path=name))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.jsonl", b'{"en": "one", "de": \n', r"t\.jsonl:1: cannot be read as JSON: .* at column 21\. Each line"),
        ("t.jsonl", GOOD_JSON + b"[1]\n", r"t\.jsonl:2: expected a JSON object, \{\.\.\.\}, in each line; got a list"),
        ("t.jsonl", GOOD_JSON + b"1\n", r"t\.jsonl:2: expected a JSON object, .* got a number"),
        ("t.jsonl", GOOD_JSON + b"[" * 100_000, r"t\.jsonl:2: cannot be read as JSON: too deep"),
        ("t.jsonl", b"{}\n" + GOOD_JSON, r"t\.jsonl: no column 'en' and no column 'de'; there are none\. Name"),
        ("t.jsonl", GOOD_JSON * 9 + b'{"en": 5, "de": "x"}', r"t\.jsonl:10: column 'en' holds a number, expected text"),
        ("t.jsonl", GOOD_JSON + b'{"en": "\\ud83d", "de": "x"}', r"t\.jsonl:2: not valid Unicode: half of a surrogate"),
        ("t.jsonl", b'{"en": "a"}', r"t\.jsonl: no column 'de'; there are en\. Name"),
        ("t.csv", b'en,de\none,"eins\n', r"t\.csv:2: cannot be read as csv: unexpected end of data\. A cell"),
        ("t.csv", b'en,de\n"one"1,eins\n', r"t\.csv:2: cannot be read as csv: .* in a \.tsv quotes are plain text"),
        ("t.csv", b"en,fr\none,un\n", r"t\.csv: no column 'de'; there are en, fr"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, name: str, content: bytes, expected: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected):
        read(tmp_path, CorpusConfig(path=name))


def test_a_number_of_too_many_digits_is_named(tmp_path: Path):
    (tmp_path / "t.jsonl").write_bytes(b'{"en": ' + b"1" * 5000 + b"}")
    with pytest.raises(
        DataError, match=r"t\.jsonl:1: cannot be read as JSON: a number of over 4,300 digits\. Each line"
    ):
        read(tmp_path, CorpusConfig(path="t.jsonl"))


def test_a_cell_above_the_limit_is_named_with_its_likely_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files_of_lines, "MOST_CHARACTERS_OF_A_CELL", 1000)
    (tmp_path / "t.csv").write_text('en,de\none,"eins\n' + "two,zwei\n" * 200)
    with pytest.raises(
        DataError, match=r"field limit \(1000\)\. .*above 1,000 characters mostly lacks its closing quote"
    ):
        read(tmp_path, CorpusConfig(path="t.csv"))


def test_half_a_surrogate_pair_is_marked_where_bad_encoding_is_to_be_dropped(tmp_path: Path):
    (tmp_path / "t.jsonl").write_bytes(GOOD_JSON + b'{"en": "\\ud83d", "de": "x"}')
    (batch,) = read(tmp_path, CorpusConfig(path="t.jsonl"), "drop")
    assert (batch.source, batch.bad_encoding) == (["one", "\ufffd"], {1})


@pytest.mark.parametrize("name", ["t.parquet.gz", "t.arrow.xz"])
def test_a_packed_table_is_refused_with_the_reason(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name}: files of this format are compressed inside\. Unpack it"):
        read(tmp_path, CorpusConfig(path=name))


def test_a_corrupt_page_of_a_parquet_file_is_found_by_its_checksum(tmp_path: Path):
    texts = [f"a text with the number {n}" for n in range(1000)]
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"en": texts, "de": texts}), tmp_path / "t.parquet", **options)
    content = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(content.replace(b"number 500", b"number 5OO"))
    with pytest.raises(DataError, match=r"t\.parquet: cannot be read: .*checksum"):
        read(tmp_path, CorpusConfig(path="t.parquet"))


def test_a_pattern_that_fits_nothing_and_sides_of_unequal_number_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=rf"{tmp_path}/x-\*\.tsv: no file fits this pattern\. .* data\.root"):
        read(tmp_path, CorpusConfig(path="x-*.tsv"))
    for name in ("a1.en", "a2.en", "a1.de"):
        (tmp_path / name).write_text("text\n")
    corpus = CorpusConfig(source="a*.en", target="a*.de")
    for act in (lambda: read(tmp_path, corpus), lambda: scan_corpus(corpus, data_in(tmp_path, corpus))):
        with pytest.raises(DataError, match=r"a\*\.en \+ .*a\*\.de: 2 files fit the source, but 1 the target"):
            act()


def test_a_file_whose_name_is_not_utf8_is_refused(tmp_path: Path):
    for side in ("en", "de"):
        (tmp_path / os.fsdecode(b"caf\xe9-1." + side.encode())).write_text("text\n")
    corpus = CorpusConfig(source="*.en", target="*.de")
    with pytest.raises(DataError, match=r"caf\\udce9-1\.en': expected a name in UTF-8, .* rename it, or set LC_ALL"):
        corpus_fingerprint(corpus, data_in(tmp_path, corpus))


def test_sides_of_a_pattern_are_aligned_file_by_file(tmp_path: Path):
    for name, lines in (("a1.en", 3), ("a2.en", 1), ("a1.de", 2), ("a2.de", 2)):
        (tmp_path / name).write_text("text\n" * lines)
    corpus = CorpusConfig(source="a*.en", target="a*.de")
    for act in (lambda: read(tmp_path, corpus), lambda: scan_corpus(corpus, data_in(tmp_path, corpus))):
        with pytest.raises(DataError, match=r"a1\.en has 3 lines, but .*a1\.de has 2"):
            act()


def test_parquet_files_of_one_corpus_that_differ_in_their_columns_are_refused(tmp_path: Path):
    pq.write_table(pa.table({"en": ["a"], "de": ["b"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"translation": [{"en": "a", "de": "b"}]}), tmp_path / "b.parquet")
    corpus = CorpusConfig(path="*.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: has the columns translation\.en and translation\.de, but .*a\.p"):
        parquet_index(corpus, data_in(tmp_path, corpus))


def test_an_index_names_missing_columns_and_columns_without_text(tmp_path: Path):
    pq.write_table(pa.table({"en": [1], "fr": ["b"]}), tmp_path / "a.parquet")
    for columns, expected in ((None, "no column 'de'; there are en, fr"), (("en", "fr"), "'en' holds int64, expected")):
        corpus = CorpusConfig(path="a.parquet", columns=columns)
        with pytest.raises(DataError, match=rf"a\.parquet: .*{expected}"):
            parquet_index(corpus, data_in(tmp_path, corpus))


def test_an_unknown_dataset_and_an_unknown_split_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere \(train\): cannot be read"):
        read(tmp_path, CorpusConfig(hub=str(tmp_path / "nowhere")))
    (tmp_path / "dataset").mkdir()
    pq.write_table(pa.table({"en": ["a"], "de": ["b"]}), tmp_path / "dataset" / "train.parquet")
    with pytest.raises(DataError, match=r"dataset \(dev\): cannot be read: .*train"):
        read(tmp_path, CorpusConfig(hub=str(tmp_path / "dataset"), split="dev"))


def test_a_parquet_file_with_bytes_that_are_not_utf8_is_named_or_its_rows_are_marked(tmp_path: Path):
    bytes_of = pa.array([b"one", b"t\xffo"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, bytes_of.buffers())
    pq.write_table(pa.table({"en": text, "de": ["eins", "zwei"]}), tmp_path / "a.parquet")
    corpus = CorpusConfig(path="a.parquet", columns=("en", "de"))
    with pytest.raises(
        DataError, match=r"a\.parquet: column 'en' is not valid UTF-8 in row 1 \(from 0\).*bad_encoding: drop"
    ):
        read(tmp_path, corpus)
    (batch,) = read(tmp_path, corpus, "drop")
    assert (batch.source, batch.bad_encoding) == (["one", "t\ufffdo"], {1})


def test_an_empty_tsv_is_an_empty_corpus(tmp_path: Path):
    (tmp_path / "a.tsv").touch()
    with pytest.raises(DataError, match="empty"):
        read(tmp_path, CorpusConfig(path="a.tsv"))
