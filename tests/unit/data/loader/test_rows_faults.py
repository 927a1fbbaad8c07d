"""Row groups that cannot be read: tried again, then named, or left out of the window."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import errors as hub_errors
from rows_helpers import (
    as_lists,
    changed_bytes,
    reader_of,
    request,
    split_of,
    token_table,
    write_table,
    write_text_split,
    write_token_split,
    write_tokenizer,
)

from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.manifest import Shard, Split, TextColumns
from dist_transformer.data.sources import retries
from dist_transformer.errors import DataError, MachineError, UserError

GROUPS = (40, 50, 30)
WINDOW = request((0, 0, 5, 40), (0, 1, 0, 50), (0, 2, 0, 3))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 2)
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


@pytest.fixture
def tokens(tmp_path: Path) -> Split:
    return write_token_split(tmp_path, "train", [GROUPS])


def shard_of(folder: Path, split: Split) -> Path:
    return folder / split.shards[0].file


def as_it_is(folder: Path, split: Split) -> Split:
    """The split with the size that its shard has now, as if that were the one prepared."""
    return replace(split, shards=(replace(split.shards[0], bytes=shard_of(folder, split).stat().st_size),))


def page_of(path: Path, row_group: int) -> tuple[int, int]:
    """First and last of some bytes in the last data page of the row group."""
    column = pq.ParquetFile(path).metadata.row_group(row_group).column(2)
    end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    return end - 8, end - 4


def assert_raised_or_quarantined(folder: Path, split: Split, row_group: int, message: str) -> None:
    """Reading `WINDOW` raises the message; or in quarantine leaves out just this row group, with its reason."""
    with pytest.raises(DataError, match=message):
        reader_of(folder, {"train": split}).read(WINDOW)
    read = reader_of(folder, {"train": split}, on_bad_row_group="quarantine").read(WINDOW)
    assert [(lost.corpus, lost.row_group) for lost in read.quarantined] == [(0, row_group)]
    rest = replace(WINDOW, slices=tuple(piece for piece in WINDOW.slices if piece.row_group != row_group))
    assert as_lists(read) == as_lists(reader_of(folder, {"train": split}).read(rest))


def test_a_flipped_byte_in_a_page_is_found_by_its_checksum(tmp_path, tokens):
    path = shard_of(tmp_path, tokens)
    with changed_bytes(path, *page_of(path, 1)):
        message = (
            rf"^{path}: row group 1 cannot be read \(could not verify page integrity, CRC checksum verification failed "
            rf"for page_ordinal 0\)\. The shard is missing or damaged: delete {tmp_path} and run `dist-transformer "
            r"prepare` again, or set data\.on_bad_row_group: quarantine to continue without its rows\.$"
        )
        assert_raised_or_quarantined(tmp_path, tokens, 1, message)


def test_bytes_flipped_in_a_page_header_are_found(tmp_path, tokens):
    path = shard_of(tmp_path, tokens)
    offset = pq.ParquetFile(path).metadata.row_group(2).column(1).dictionary_page_offset
    with changed_bytes(path, offset, offset + 20):
        assert_raised_or_quarantined(tmp_path, tokens, 2, rf"^{path}: row group 2 cannot be read \(.+\)\. The shard is")


def test_the_first_pass_for_the_alignment_of_tokens_goes_by_the_quarantine_and_validation_does_not(
    tmp_path, tokens, caplog
):
    path, splits = shard_of(tmp_path, tokens), {"train": tokens}
    groups = [as_lists(rows) for rows in reader_of(tmp_path, splits).read_first_pass(0)]
    with changed_bytes(path, *page_of(path, 1)):
        quarantine = reader_of(tmp_path, splits, on_bad_row_group="quarantine", max_quarantined_row_groups=1)
        assert [as_lists(rows) for rows in quarantine.read_first_pass(0)] == [groups[0], groups[2]]
        assert f"left out row group 1 of {path} (could not verify page integrity" in caplog.text
        for read in (reader_of(tmp_path, splits).read_first_pass(0), quarantine.read_split("train")):
            with pytest.raises(DataError, match="row group 1 cannot be read"):
                list(read)
    path.unlink()
    quarantine = reader_of(tmp_path, splits, on_bad_row_group="quarantine", max_quarantined_row_groups=1)
    with pytest.raises(DataError, match="row group 1 cannot be read"):
        list(quarantine.read_first_pass(0))


@pytest.mark.parametrize("bytes_left", [0, 3, 200, -1])
def test_a_truncated_shard_loses_all_its_row_groups(tmp_path, tokens, bytes_left):
    path = shard_of(tmp_path, tokens)
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(
        DataError, match=rf"^{path}: row group 0 cannot be read \(.*(Parquet|footer).*\)\. The shard is"
    ):
        reader_of(tmp_path, {"train": tokens}).read(WINDOW)
    read = reader_of(tmp_path, {"train": tokens}, on_bad_row_group="quarantine").read(WINDOW)
    assert [lost.row_group for lost in read.quarantined] == [0, 1, 2]
    assert as_lists(read) == []


def test_a_shard_that_has_vanished_is_named(tmp_path, tokens):
    path = shard_of(tmp_path, tokens)
    path.unlink()
    with pytest.raises(DataError, match=rf"^{path}: row group 0 cannot be read \(.*No such file.*\)\. The shard is"):
        reader_of(tmp_path, {"train": tokens}).read(WINDOW)


def test_a_shard_that_comes_back_within_the_attempts_is_read(tmp_path, tokens, monkeypatch):
    path = shard_of(tmp_path, tokens)
    expected = as_lists(reader_of(tmp_path, {"train": tokens}).read(WINDOW))
    hidden = path.rename(path.with_suffix(".hidden"))
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: hidden.exists() and os.rename(hidden, path))
    assert as_lists(reader_of(tmp_path, {"train": tokens}).read(WINDOW)) == expected


def test_a_file_that_was_mended_while_it_was_open_is_opened_anew(tmp_path, tokens, monkeypatch):
    path = shard_of(tmp_path, tokens)
    expected = as_lists(reader_of(tmp_path, {"train": tokens}).read(WINDOW))
    whole = path.read_bytes()
    reader = reader_of(tmp_path, {"train": tokens})
    reader.read(request((0, 0, 0, 1)))
    path.write_bytes(bytes(len(whole)))  # the reader's open file is this one

    def mend(seconds: float) -> None:
        path.unlink()
        path.write_bytes(whole)

    monkeypatch.setattr(retries.time, "sleep", mend)
    assert as_lists(reader.read(WINDOW)) == expected


def test_another_number_of_rows_or_row_groups_than_in_the_manifest_is_refused(tmp_path, tokens):
    path = shard_of(tmp_path, tokens)
    write_table(token_table(90, 0), path, [40, 50])
    message = r"row group 2 cannot be read \(the file has 2 row groups\)"
    assert_raised_or_quarantined(tmp_path, as_it_is(tmp_path, tokens), 2, message)
    write_table(token_table(120, 0), path, [40, 49, 30])
    message = r"row group 1 cannot be read \(it has 49 rows, the manifest says 50\)"
    assert_raised_or_quarantined(tmp_path, as_it_is(tmp_path, tokens), 1, message)


@pytest.mark.parametrize("on_bad_row_group", ["raise", "quarantine"])
def test_a_shard_of_another_corpus_ends_the_run_also_in_quarantine(tmp_path, tokens, on_bad_row_group):
    path = shard_of(tmp_path, tokens)
    write_table(token_table(120, 7), path, GROUPS, compression="none")
    before, now = tokens.shards[0].bytes, path.stat().st_size
    message = rf"^{path}: expected the file of {before} bytes that was prepared, got one of {now}: the corpus was replaced; put"
    with pytest.raises(DataError, match=message):
        reader_of(tmp_path, {"train": tokens}, on_bad_row_group=on_bad_row_group).read(WINDOW)


def test_a_shard_that_was_opened_before_its_corpus_was_replaced_is_read_on(tmp_path, tokens):
    reader, path = reader_of(tmp_path, {"train": tokens}), shard_of(tmp_path, tokens)
    expected = as_lists(reader.read(WINDOW))
    path.rename(path.with_suffix(".1"))
    write_table(token_table(120, 7), path, GROUPS, compression="none")
    assert as_lists(reader.read(WINDOW)) == expected


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("source", None, r"no column 'source', only \['row_id', 'target'\]"),
        ("target", ["text"] * 120, r"column 'target' holds string; expected lists of token ids"),
        ("target", [[0.5]] * 120, r"column 'target' holds list<element: double>; expected lists of token ids"),
        ("source", [[1], None] * 60, r"column 'source' holds list<element: int64>, 20 of them null; expected lists"),
        ("source", [[1], [None]] * 60, r"column 'source' holds lists with nulls in them; expected token ids"),
        ("row_id", ["1"] * 120, r"column 'row_id' holds string; expected integers"),
    ],
)
def test_columns_that_are_not_those_of_a_shard_are_named(tmp_path, tokens, column, values, message):
    table = token_table(120, 0).drop_columns([column])
    if values is not None:
        table = table.append_column(column, pa.array(values))
    write_table(table, shard_of(tmp_path, tokens), GROUPS)
    with pytest.raises(DataError, match=rf"row group 0 cannot be read \({message}.*\)\. The shard is"):
        reader_of(tmp_path, {"train": as_it_is(tmp_path, tokens)}).read(WINDOW)


def test_what_cannot_change_is_not_tried_again(tmp_path, tokens, pauses):
    write_table(token_table(120, 0).drop_columns(["source"]), shard_of(tmp_path, tokens), GROUPS)
    with pytest.raises(DataError, match="no column 'source'"):
        reader_of(tmp_path, {"train": as_it_is(tmp_path, tokens)}).read(WINDOW)
    assert pauses == []


def test_validation_ends_with_a_bad_row_group_also_in_quarantine(tmp_path):
    split = write_token_split(tmp_path, "validation", [GROUPS])
    path = shard_of(tmp_path, split)
    reader = reader_of(tmp_path, {"validation": split}, on_bad_row_group="quarantine")
    with changed_bytes(path, *page_of(path, 1)):
        rows = reader.read_split("validation")
        assert len(next(rows).row_ids) == 40
        message = rf"^{path}: row group 1 cannot be read \(.+\)\. .* run `dist-transformer prepare` again\.$"
        with pytest.raises(DataError, match=message):
            next(rows)


def test_row_groups_that_the_request_leaves_out_are_not_touched(tmp_path, tokens):
    shard_of(tmp_path, tokens).unlink()
    without = tuple((0, group) for group in range(3))
    read = reader_of(tmp_path, {"train": tokens}).read(replace(WINDOW, quarantined=(*without, (0, 17))))
    file = str(shard_of(tmp_path, tokens))
    assert read.quarantined == tuple(
        Quarantined(WINDOW.key, 0, group, f"row group {group} of {file}", "quarantined before") for group in range(3)
    )


# The user's own files, read in place.


@pytest.fixture
def texts(tmp_path: Path) -> Split:
    write_tokenizer(tmp_path / "prepared")
    return write_text_split(tmp_path / "corpus.parquet", GROUPS)


def test_a_damaged_file_of_the_user_is_to_be_mended_by_the_user(tmp_path, texts):
    path = tmp_path / "corpus.parquet"
    path.write_bytes(path.read_bytes()[:100])
    message = (
        rf"^{path}: row group 0 cannot be read \(.+\)\. Repair or restore the file, or set data\.on_bad_row_group: "
        r"quarantine to continue without its rows\.$"
    )
    with pytest.raises(DataError, match=message):
        reader_of(tmp_path / "prepared", {"train": texts}).read(WINDOW)


def test_bad_encoding_names_the_column_and_the_row(tmp_path, texts):
    lines = pa.array([b"good"] * 45 + [b"bad \xff"] + [b"good"] * 74).cast(pa.binary())
    text = pa.StringArray.from_buffers(120, *lines.buffers()[1:])
    write_table(pa.table({"en": ["good"] * 120, "de": text}), tmp_path / "corpus.parquet", GROUPS)
    message = (
        r"row group 1 cannot be read \(column 'de' is not valid UTF-8 in row 5 of the row group; convert it, or set "
        r"data\.filters\.bad_encoding: drop\)\. Repair or restore the file"
    )
    assert_raised_or_quarantined(tmp_path / "prepared", as_it_is(tmp_path, texts), 1, message)


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        ({"en": ["a"], "fr": ["b"]}, ("en", "de"), r"no column 'de', only \['en', 'fr'\]"),
        ({"en": ["a"], "de": [1]}, ("en", "de"), r"column 'de' holds int64; expected text"),
        ({"t": [{"en": "a"}]}, ("t.en", "t.de"), r"no column 't\.de', only \['t'\]"),
        ({"t": ["a"]}, ("t.en", "u.de"), r"no column 't\.en' and no column 'u\.de', only \['t'\]"),
    ],
)
def test_columns_that_do_not_hold_text_are_named(tmp_path, texts, table, columns, message):
    path = tmp_path / "other.parquet"
    groups = write_table(pa.table(table), path, [1])
    shard = Shard(str(path), path.stat().st_size, "", groups)
    split = split_of([shard], TextColumns(*columns, ""))
    with pytest.raises(DataError, match=rf"^{path}: row group 0 cannot be read \({message}\)\. Repair or restore"):
        reader_of(tmp_path / "prepared", {"train": split}).read(request((0, 0, 0, 1)))


# Remote files, on a filesystem that fails as it is told.


def answer_of_hub(status: int) -> Exception:
    request: Any = SimpleNamespace(url="http://hub", method="GET")
    return hub_errors.HfHubHTTPError(f"status {status}", response=hub_errors.Response(status, request=request))


def answer_of_server(status: int) -> Exception:
    error = FileNotFoundError("http://server/a.parquet")
    error.__cause__ = aiohttp.ClientResponseError(cast(Any, None), (), status=status)
    return error


@pytest.mark.parametrize(
    ("error", "is_outage"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (TimeoutError("no answer"), True),
        (ConnectionResetError("reset by peer"), True),
        (answer_of_hub(503), True),
        (answer_of_hub(429), True),
        (hub_errors.HTTPError("no route"), True),
        (hub_errors.OfflineModeIsEnabled("offline mode is enabled"), False),
        (answer_of_hub(404), False),
        (answer_of_server(503), True),
        (answer_of_server(429), True),
        (answer_of_server(403), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError("could not verify page integrity"), False),  # Arrow's, of damaged bytes
    ],
    ids=str,
)
def test_an_outage_is_put_back_into_the_queue_and_a_bad_file_is_not(tmp_path, tokens, monkeypatch, error, is_outage):
    def fail(file: str) -> None:
        raise error

    monkeypatch.setattr("dist_transformer.data.loader.row_groups.open_parquet", fail)
    with pytest.raises(UserError, match="row group 0 cannot be read") as raised:
        reader_of(tmp_path, {"train": tokens}).read(WINDOW)
    assert type(raised.value) is (MachineError if is_outage else DataError)
    assert ("Start again when its disk" in str(raised.value)) == is_outage
    assert ("delete" in str(raised.value)) == (not is_outage)


def test_a_file_of_the_hub_that_is_read_in_place_needs_the_hub_and_the_message_names_the_way_around(
    tmp_path, texts, monkeypatch, pauses
):
    def fail(file: str) -> None:
        raise hub_errors.OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr("dist_transformer.data.loader.row_groups.open_parquet", fail)
    of_hub = replace(texts, shards=(replace(texts.shards[0], file="hf://datasets/me/pairs@1/train.parquet"),))
    message = (
        r"offline mode is enabled\)\. Repair .*, its server, HF_HUB_OFFLINE or HF_HOME, .* data\.on_the_fly: false, or"
    )
    with pytest.raises(DataError, match=message):
        reader_of(tmp_path / "prepared", {"train": of_hub}).read(WINDOW)
    assert pauses == []
