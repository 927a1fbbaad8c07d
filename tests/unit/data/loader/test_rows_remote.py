"""Row groups of remote files: a read that fails is tried again, an outage is no bad file."""

import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from rows_helpers import (
    FAULTY_FOLDER,
    as_lists,
    reader_of,
    request,
    write_text_split,
    write_tokenizer,
)
from web_server import WebServer, web_server

from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.manifest import Split
from dist_transformer.data.sources import retries
from dist_transformer.errors import DataError, MachineError

GROUPS = (40, 50, 30)


WINDOW = request((0, 0, 5, 40), (0, 1, 0, 50), (0, 2, 0, 3))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 2)
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Split:
    write_tokenizer(tmp_path / "prepared")
    return write_text_split(tmp_path / "corpus.parquet", GROUPS)


@pytest.fixture
def remote(tmp_path: Path, texts: Split, monkeypatch: pytest.MonkeyPatch) -> Split:
    monkeypatch.syspath_prepend(str(FAULTY_FOLDER))
    fsspec.register_implementation("faulty", "faulty_filesystem.FaultyFileSystem", clobber=True)
    return write_text_split(tmp_path / "remote/corpus.parquet", GROUPS, address="faulty://")


def plan_faults(tmp_path: Path, **faults: Any) -> None:
    (tmp_path / "remote/faults.json").write_text(json.dumps({"*.parquet": faults}), encoding="utf-8")


def remote_reader(tmp_path: Path, split: Split, **settings: Any) -> RowReader:
    return reader_of(tmp_path / "prepared", {"train": split}, **settings)


def test_a_slow_remote_that_fails_twice_is_read_in_the_third_attempt(
    tmp_path, texts, remote, pauses, caplog, monkeypatch
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 3)
    expected = as_lists(remote_reader(tmp_path, texts).read(WINDOW))
    plan_faults(tmp_path, failures=2, delay_seconds=0.001)
    with caplog.at_level(logging.WARNING, "dist_transformer"):
        read = remote_reader(tmp_path, remote).read(WINDOW)
    assert as_lists(read) == expected
    assert read.quarantined == ()
    address, path = f"faulty://{tmp_path}/remote/corpus.parquet", f"{tmp_path}/remote/corpus.parquet"
    assert [record.getMessage() for record in caplog.records] == [
        f"{address}: {path}: the remote did not answer in time; attempt {attempt} of 3, again in {pause:.1f} s"
        for attempt, pause in enumerate([pause for pause in pauses if pause >= 0.1], start=1)
    ]


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"always": True}, "the remote does not answer"),
        ({"fail_after_bytes": 100}, "the remote does not answer"),
        ({"missing": True}, "/remote/corpus.parquet"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_remote_that_never_answers_raises_or_is_left_out(tmp_path, remote, faults, reason):
    plan_faults(tmp_path, **faults)
    address = f"faulty://{tmp_path}/remote/corpus.parquet"
    message = rf"^{address}: row group 0 cannot be read \(.*{reason}\)\. Repair or restore the file, or set data"
    with pytest.raises(DataError, match=message):
        remote_reader(tmp_path, remote).read(WINDOW)
    read = remote_reader(tmp_path, remote, on_bad_row_group="quarantine").read(WINDOW)
    assert [lost.place for lost in read.quarantined] == [f"row group {group} of {address}" for group in range(3)]


def at_server(split: Split, server: WebServer) -> Split:
    (shard,) = split.shards
    return replace(split, shards=(replace(shard, file=f"{server.address}/{Path(shard.file).name}"),))


def test_a_proxy_that_sends_the_whole_file_now_and_then_is_asked_again(tmp_path, texts):
    expected = as_lists(remote_reader(tmp_path, texts).read(WINDOW))
    with web_server(tmp_path) as server:
        split = at_server(texts, server)
        assert as_lists(remote_reader(tmp_path, split).read(WINDOW)) == expected
        for number in range(1, server.requests.total() + 1):
            server.faults = {server.requests.total() + number: "whole"}
            assert as_lists(remote_reader(tmp_path, split).read(WINDOW)) == expected
            assert not server.faults


@pytest.mark.parametrize(("fault", "is_open"), [("busy", True), ("busy", False), ("whole", True)])
def test_a_web_server_that_stays_faulty_is_an_outage_of_so_many_requests(tmp_path, texts, fault, is_open):
    with web_server(tmp_path) as server:
        reader = remote_reader(tmp_path, at_server(texts, server))
        if is_open:
            reader.read(WINDOW)
        before = server.requests.total()
        server.faults = dict.fromkeys(range(before, before + 1000), fault)
        with pytest.raises(MachineError, match=r"corpus\.parquet: row group 0 cannot be read"):
            reader.read(WINDOW)
        assert server.requests.total() == before + (2 if is_open else 4)  # two attempts; HEAD and GET of each opening


def test_each_row_group_of_a_window_is_read_once_however_it_is_cut(tmp_path, remote):
    from faulty_filesystem import FaultyFileSystem

    path = f"{tmp_path}/remote/corpus.parquet"
    reads = []
    for pieces in ([(0, 1, 0, 50)], [(0, 1, row, row + 5) for row in range(0, 50, 5)]):
        before = FaultyFileSystem.calls[path]
        remote_reader(tmp_path, remote).read(request(*pieces))
        reads.append(FaultyFileSystem.calls[path] - before)
    assert reads[0] == reads[1] > 0


def test_a_reader_of_remote_files_can_be_sent_to_another_process(tmp_path, remote):
    reader = remote_reader(tmp_path, remote)
    expected = as_lists(reader.read(WINDOW))
    assert as_lists(pickle.loads(pickle.dumps(reader)).read(WINDOW)) == expected
