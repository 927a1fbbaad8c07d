"""Any text in any format: pairs stay aligned, each line is counted, none is lost; the same of what is translated."""

import csv
import io
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
from forked_command import bounded, must_end_in_a_message, run_command
from hypothesis import given
from hypothesis import strategies as st
from prepare_helpers import config_of, read_split
from source_helpers import PACKERS
from tokenised_models import demo_tokenizers, make_model_folder

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare import chunks, preparation
from dist_transformer.data.sources.corpus import read_corpus, scan_corpus
from dist_transformer.data.sources.files import COMPRESSIONS
from dist_transformer.data.sources.lines import LONE_SURROGATE
from dist_transformer.errors import DataError

pytestmark = pytest.mark.slow

SEPARATORS = [*"\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", "\r\r", "\0", "\ufeff", "\t", "\x1a", "\x08"]
"""All that a program may take for the end of a line or of a text, but is none."""
ODD = [
    *SEPARATORS,
    "",
    " ",
    "a b",
    "é",
    "👾",
    "e\u0301",
    '"',
    '""',
    ",",
    "\\n",
    "\\",
    "{",
    "\u200b",
    "\ufffd",
    "<s>",
    "▁",
]
BAD_BYTES = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xfe\xff", b"\xc0\xaf"]
TEXTS = st.lists(
    st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=4),
    max_size=5,
).map("".join)
LINES = st.lists(st.sampled_from([text.encode("utf-8", "surrogatepass") for text in ODD] + BAD_BYTES), max_size=5).map(
    b"".join
)
ENDS = st.sampled_from([b"\n", b"\r\n"])
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    make_model_folder(folder / "model")
    return folder / "model"


def config_for(folder: Path, corpus: dict[str, object], **data: object) -> Config:
    """The configuration of a preparation with this corpus alone, and with a tokenizer that is there."""
    tokenizer = {"source_model": str(demo_tokenizers(folder, True).source)}
    filters = {"bad_encoding": "drop", "max_length_ratio": 1e9}
    return config_of(
        folder, data={"train": corpus, "validation": None, "filters": filters, **data}, tokenizer=tokenizer
    )


def read(config: Config, batch_rows: int = 3) -> tuple[list[tuple[str, str]], set[int]]:
    """All pairs, with "" for a side that is not there, and the numbers of those that are badly encoded."""
    assert config.data.train is not None
    pairs, bad = [], set()
    for batch in read_corpus(config.data.train, config.data, batch_rows):
        assert batch.first_row == len(pairs)
        bad |= {batch.first_row + position for position in batch.bad_encoding}
        pairs += [(source or "", target or "") for source, target in zip(batch.source, batch.target, strict=True)]
    return pairs, bad


def text_of(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


def is_bad(line: bytes) -> bool:
    return line != line.decode("utf-8", "replace").encode("utf-8")


@bounded(75)
@given(
    st.lists(st.tuples(LINES, LINES), min_size=1, max_size=8),
    ENDS,
    st.booleans(),
    st.sampled_from(["", *COMPRESSIONS]),
    st.booleans(),
)
def test_aligned_lines_are_read_as_they_are(folder, pairs, end, has_last_end, packing, has_mark):
    """Only a line feed ends a line, with one carriage return before it or without."""
    for side, name in enumerate(("a", "b")):
        content = end.join(pair[side] for pair in pairs) + (end if has_last_end or not all(pairs[-1]) else b"")
        mark = BYTE_ORDER_MARK if has_mark or content.startswith(BYTE_ORDER_MARK) else b""  # one is left out
        (folder / f"{name}.txt{packing}").write_bytes(PACKERS[packing](mark + content))
    config = config_for(folder, {"source": f"a.txt{packing}", "target": f"b.txt{packing}"})
    found, bad = read(config)
    ends = [end.removesuffix(b"\n")] * (len(pairs) - 1) + [
        end.removesuffix(b"\n") if has_last_end or not all(pairs[-1]) else b""
    ]
    assert found == [tuple(text_of(side + rest) for side in pair) for pair, rest in zip(pairs, ends, strict=True)]
    assert bad == {number for number, pair in enumerate(pairs) if any(map(is_bad, pair))}
    assert config.data.train is not None
    assert scan_corpus(config.data.train, config.data) == len(pairs)


@bounded(50)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8), ENDS)
def test_cells_of_a_csv_are_read_as_they_are(folder, pairs, end):
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=end.decode(), quoting=csv.QUOTE_ALL)
    writer.writerows([("en", "de"), *pairs])
    (folder / "a.csv").write_bytes(out.getvalue().encode("utf-8"))
    assert read(config_for(folder, {"path": "a.csv"})) == (pairs, set())


@bounded(50)
@given(
    st.lists(st.tuples(*2 * [st.one_of(TEXTS, st.just("\ud800"), st.just("a\udfff\ud800b"))]), min_size=1, max_size=8),
    ENDS,
    st.booleans(),
)
def test_texts_of_json_are_read_as_they_are_but_for_half_a_surrogate_pair(folder, pairs, end, is_ascii):
    """A line of JSON may say what no text can hold: such a pair is dropped and counted."""
    with_halves = {number for number, pair in enumerate(pairs) if any(map(LONE_SURROGATE.search, pair))}
    lines = [
        json.dumps({"en": s, "de": t}, ensure_ascii=is_ascii or n in with_halves) for n, (s, t) in enumerate(pairs)
    ]
    (folder / "a.jsonl").write_bytes(end.join(line.encode("utf-8") for line in lines))
    found, bad = read(config_for(folder, {"path": "a.jsonl"}))
    assert found == [tuple(LONE_SURROGATE.sub("\ufffd", text) for text in pair) for pair in pairs]
    assert bad == with_halves


@bounded(50)
@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=8), ENDS)
def test_columns_between_tabs_are_read_as_they_are(folder, pairs, end):
    rows = [tuple(side.replace(b"\t", b" ") for side in pair) for pair in pairs]
    (folder / "a.tsv").write_bytes(BYTE_ORDER_MARK + b"".join(b"\t".join(row) + end for row in rows))
    found, bad = read(config_for(folder, {"path": "a.tsv", "columns": ["0", "1"]}))
    assert [source for source, _ in found] == [row[0].decode("utf-8", "replace") for row in rows]
    assert [target for _, target in found] == [text_of(row[1] + end.removesuffix(b"\n")) for row in rows]
    assert bad == {number for number, row in enumerate(rows) if any(map(is_bad, row))}


@bounded(50)
@given(st.sampled_from(["a.csv", "a.tsv", "a.jsonl", "a.txt", "a.parquet", "a.arrow", "a.csv.gz", "a.jsonl.zst", "a.txt.xz"]),
       st.lists(st.sampled_from([*(text.encode("utf-8", "surrogatepass") for text in ODD), *BAD_BYTES, b"\n", b'{"en": ',
                                 b'"en","de"\n', b"en\tde\n", b'{"en": "x", "de": "y"}\n', b"PAR1", b"ARROW1\0\0", b"\x1f\x8b"]),
                max_size=12).map(b"".join), st.sampled_from(["drop", "raise"]))  # fmt: skip
def test_any_bytes_under_any_name_are_read_or_refused_with_a_message(folder, name, content, bad_encoding):
    (folder / name).write_bytes(content)
    corpus = {"source": name, "target": name} if ".txt" in name else {"path": name}
    config = config_for(folder, corpus, filters={"bad_encoding": bad_encoding})
    with suppress(DataError):
        read(config)


def numbered(pairs: list[tuple[bytes, bytes]], side: int) -> bytes:
    """One side of the pairs as lines, each beginning with its number."""
    return b"".join(b"%d %s\n" % (number, pair[side]) for number, pair in enumerate(pairs))


def pairs_of(folder: Path, manifest: Manifest) -> list[tuple[int, str, str]]:
    """Row number and both texts of each kept row."""
    split = manifest.splits["train"]
    if split.text is None:
        return read_split(folder, manifest, "train")
    rows = [row for shard in split.shards for row in pq.read_table(folder / shard.file).to_pylist()]
    return [(row["row_id"], row["source"], row["target"]) for row in rows]


@bounded(15)
@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=20), st.booleans())
def test_each_pair_is_kept_with_its_translation_or_counted_by_the_rule_it_breaks(folder, pairs, on_the_fly):
    pairs = [*pairs, (b"word", b"Wort")]
    corpus = {"source": "numbered.en", "target": "numbered.de"}
    for side, name in enumerate(corpus.values()):
        (folder / name).write_bytes(numbered(pairs, side))
    prepared = folder / "prepared"
    shutil.rmtree(prepared, ignore_errors=True)
    small = mock.patch.multiple(chunks, BATCH_ROWS=4, CHUNK_ROWS=8, SHARD_ROWS=5)
    with small, mock.patch.object(preparation, "write_report"):
        manifest = preparation.prepare(config_for(folder, corpus, on_the_fly=on_the_fly), prepared, threads=1)
    split, rows = manifest.splits["train"], pairs_of(prepared, manifest)
    bad = [number for number, pair in enumerate(pairs) if any(map(is_bad, pair))]
    assert (split.read_rows, split.dropped.get("bad_encoding", 0)) == (len(pairs), len(bad))
    assert split.rows == len(rows) == len(pairs) - sum(split.dropped.values())
    numbers = [row for row, _, _ in rows]
    assert len({*numbers}) == len(numbers)
    assert not {*numbers} & {*bad}
    for row, source, target in rows:
        assert [int(text.split()[0]) for text in (source, target)] == [row, row]


@bounded(6)
@given(st.lists(LINES, min_size=1, max_size=8), st.sampled_from([[], ["--json"], ["--n-best", "1", "--alignment"]]))
def test_a_translation_has_a_line_for_each_line(folder, model, lines, form):
    given, output = folder / "given.txt", folder / "translated.txt"
    given.write_bytes(b"".join(line + b"\n" for line in lines))
    bad = next((number for number, line in enumerate(lines, start=1) if is_bad(line)), None)
    arguments = ("translate", model, "--beam", "1", *form)
    (code, streamed) = run_command(*arguments, text=given.read_bytes().decode("utf-8", "surrogateescape"))
    (code_of_file, said) = run_command(*arguments, "--input", given, "--output", output)
    if bad is not None:
        assert code == code_of_file == 2
        assert f"line {bad}: not valid UTF-8" in streamed
        assert f"{given}, line {bad}: not valid UTF-8" in said
        return
    assert (code, code_of_file) == (0, 0), (streamed, said)
    assert streamed.count("\n") == len(lines)
    assert output.read_bytes().decode("utf-8") == streamed
    for path in (output, folder / "translated.txt.plan.json"):
        path.unlink()


@contextmanager
def little_memory(more_bytes: int) -> Iterator[None]:
    """Processes forked in this block get no more memory than this one has, and so much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_line_of_a_hundred_megabytes_is_counted_in_bounded_memory(folder, model):
    size, piece = 100_000_000, "word e\u2028\u0301"
    long = piece * (size // len(piece.encode("utf-8")))
    lines = [f"Sentence {number}." for number in range(60)]
    for name, middle in (("long.en", long), ("long.de", "kurz")):
        (folder / name).write_text("\n".join([*lines, middle, *lines]) + "\n", encoding="utf-8")
    (folder / "long.yaml").write_text(
        f"data: {{root: {folder}, prepared: {folder}/long, train: {{source: long.en, target: long.de}}}}\n"
        "tokenizer: {vocabulary_size: 40}\n", encoding="utf-8",
    )  # fmt: skip
    shutil.rmtree(folder / "long", ignore_errors=True)
    with little_memory(15 * size):
        code, said = run_command("prepare", folder / "long.yaml")
        assert code == 0, said
        split = Manifest.load(folder / "long").splits["train"]
        assert (split.read_rows, split.rows, split.dropped) == (121, 120, {"too_long": 1})
        said = must_end_in_a_message(
            "translate", str(model), "--input", f"{folder}/long.en", "--output", f"{folder}/out"
        )
        assert f"line 61: {len(long.strip()):,} characters, over" in said
        said = must_end_in_a_message(
            "score", str(model), "--source", f"{folder}/long.en", "--target", f"{folder}/long.de"
        )
        assert "line 61: " in said
