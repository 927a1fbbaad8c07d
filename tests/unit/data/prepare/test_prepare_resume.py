"""A preparation that is stopped anywhere goes on where it was and ends with the same corpus."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_helpers import PAIRS, SMALL, config_of, in_fixed_folder, read_split, write_text

from dist_transformer.config.schema import Config
from dist_transformer.data.loader.window_request import random_generator
from dist_transformer.data.manifest import MANIFEST_NAME, Manifest
from dist_transformer.data.prepare import chunks, preparation, shards
from dist_transformer.data.prepare.claims import WAITING, WORK_FOLDER, Work
from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.data.prepare.state import STATE_NAME, PrepareState
from dist_transformer.errors import DataError
from dist_transformer.files import read_json, write_json

pytestmark = pytest.mark.usefixtures("small_pieces")

COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())
"""Counts the memory of tables; lives as long as any of them."""
RECORDS = 12
"""Written for the small corpus: scan 1, tokenizer 1, chunks 4 + 1, ends of two corpora 2, ranges 3."""


class Stopped(RuntimeError):
    """Stands for whatever ends a process."""


def stop_at_record(patch: pytest.MonkeyPatch, number: int, after: bool) -> None:
    """Raises before or after it is written for the `number`th time that something is done."""
    records = []

    def stopping(write: Callable[..., None]) -> Callable[..., None]:
        def stopping_write(*arguments: Any) -> None:
            records.append(1)
            if len(records) == number and not after:
                raise Stopped
            write(*arguments)
            if len(records) == number:
                raise Stopped

        return stopping_write

    patch.setattr(PrepareState, "save", stopping(PrepareState.save))
    patch.setattr(Work, "finish", stopping(Work.finish))


def stopped_between_chunks(folder: Path) -> Config:
    """Configuration of a preparation that was stopped when some of its chunks were made."""
    write_text(folder)
    config = config_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, 4, after=True)
        with pytest.raises(Stopped):
            prepare(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, RECORDS + 1))
def test_stopped_around_any_record_the_result_is_the_same(tmp_path: Path, whole: Manifest, number: int, after: bool):
    write_text(tmp_path)
    config = config_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, number, after)
        with pytest.raises(Stopped):
            prepare(config)
    assert not (prepared_folder(config) / MANIFEST_NAME).exists()
    assert prepare(config) == whole
    assert not (prepared_folder(config) / WORK_FOLDER).exists()


@pytest.mark.slow
def test_finished_units_are_not_made_again(tmp_path: Path, whole: Manifest, monkeypatch: pytest.MonkeyPatch):
    config = stopped_between_chunks(tmp_path)
    made: list[str] = []
    finish = Work.finish
    monkeypatch.setattr(Work, "finish", lambda work, unit, result: (made.append(unit), finish(work, unit, result)))
    stages: set[str] = set()
    assert prepare(config, progress=lambda stage, done, total: stages.add(stage)) == whole
    assert not stages & {"scan", "tokenizer"}
    assert [unit for unit in made if unit.startswith("train-chunk")] == ["train-chunk-00002", "train-chunk-00003"]


def test_a_corpus_is_not_read_behind_its_last_free_chunk(tmp_path: Path, whole: Manifest):
    write_text(tmp_path)
    config = config_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, 3, after=False)  # before the first chunk
        with pytest.raises(Stopped):
            prepare(config)
    elsewhere = Work(prepared_folder(config)).claim("train-chunk-00001")
    assert elsewhere is not None
    rows: list[int] = []

    def stop_when_only_that_is_left(stage: str, done: int, total: int | None) -> None:
        rows.extend([done] * (stage == "train"))
        if stage == WAITING:
            raise Stopped

    with pytest.raises(Stopped):
        prepare(config, progress=stop_when_only_that_is_left)
    assert max(rows) == 500
    rows.clear()
    elsewhere.release()
    assert prepare(config, progress=stop_when_only_that_is_left) == whole
    assert max(rows) == 300


def test_ranges_are_gathered_together_to_the_same_shards_also_after_a_stop_between_them(
    tmp_path: Path, whole: Manifest, monkeypatch: pytest.MonkeyPatch
):
    write_text(tmp_path)
    config = config_of(tmp_path)
    monkeypatch.setattr(chunks, "FEWEST_RUNS", 1)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, RECORDS - 2, after=True)  # after the first of three ranges
        with pytest.raises(Stopped):
            prepare(config)
    read, opened = shards._read_range, list[Path]()
    monkeypatch.setattr(shards, "_read_range", lambda path, *range_: (opened.append(path), read(path, *range_))[1])
    assert prepare(config) == whole
    assert len(opened) == len({*opened}) == 4  # each spill file once, for both ranges


def test_a_manifest_whose_work_was_not_cleared_away_is_complete(tmp_path: Path, whole: Manifest):
    write_text(tmp_path)
    config = config_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation.shutil, "rmtree", lambda *arguments, **options: None)
        prepare(config)
    work = prepared_folder(config) / WORK_FOLDER
    assert work.exists()
    assert prepare(config) == whole
    assert not work.exists()


@pytest.mark.parametrize("name", ["thesis/notes.txt", "notes.json", "spill/notes.txt", "thesis"])
def test_a_folder_named_work_stays_if_something_in_it_is_not_ours(tmp_path: Path, name: str):
    write_text(tmp_path)
    config = config_of(tmp_path)
    prepare(config)
    mine = prepared_folder(config) / WORK_FOLDER / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine") if mine.suffix else mine.mkdir()
    prepare(config)
    assert mine.exists()


def test_a_stop_request_passes_through_the_training_of_the_tokenizer(tmp_path: Path, whole: Manifest):
    write_text(tmp_path)
    config = config_of(tmp_path)

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenizer" and done:
            sys.exit(75)

    with pytest.raises(SystemExit, match="75"):
        prepare(config, progress=stop)
    assert prepare(config) == whole


KILLED = """
import os, signal, sys
from pathlib import Path
from dist_transformer.data.prepare import chunks, preparation, shards
from prepare_helpers import config_of

for name, rows in {small!r}.items():
    setattr(chunks, name, rows)

def progress(stage, done, total):
    if stage == {stage!r} and done >= {done!r}:
        os.kill(os.getpid(), signal.SIGKILL)

preparation.prepare(config_of(Path({folder!r})), progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "done"), [("tokenizer", 100), ("train", 400), ("shuffle train", 200)])
def test_killed_in_the_middle_it_goes_on_to_the_same_corpus(tmp_path: Path, whole: Manifest, stage: str, done: int):
    write_text(tmp_path)
    config = config_of(tmp_path)
    script = KILLED.format(small=SMALL, stage=stage, done=done, folder=str(tmp_path))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert process.returncode == -signal.SIGKILL
    folder = prepared_folder(config)
    (folder / "shards").mkdir(exist_ok=True)
    (folder / "shards" / ".train-00001.parquet.1.tmp").write_bytes(b"torn")
    assert prepare(config) == whole
    assert not list(folder.rglob(".*.tmp"))
    assert len(read_split(folder, whole, "train")) == 500


def test_two_at_once_make_it_once(tmp_path: Path, whole: Manifest):
    write_text(tmp_path)
    config = config_of(tmp_path)
    results: list[Manifest] = []
    scans: list[str] = []

    def work() -> None:
        results.append(prepare(config, progress=lambda stage, done, total: scans.append(stage)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [whole] * 3
    assert scans.count("scan") == 2


def test_chunks_of_a_version_that_counted_no_unknown_tokens_are_taken(tmp_path: Path, whole: Manifest):
    config = stopped_between_chunks(tmp_path)
    [*made] = (prepared_folder(config) / WORK_FOLDER).glob("train-chunk-*.json")
    for path in made:
        result = read_json(path)
        del result["counts"]["unknown"]
        write_json(path, result)
    assert made
    assert prepare(config) == whole


def test_an_unreadable_state_is_named(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    folder = prepared_folder(config)
    (folder / WORK_FOLDER).mkdir(parents=True)
    (folder / WORK_FOLDER / STATE_NAME).write_text("{}")
    with pytest.raises(DataError, match=r"state\.json: cannot be read .* Delete .* and prepare again"):
        prepare(config)


def test_a_preparation_that_was_begun_without_commits_of_the_hub_goes_on(tmp_path: Path, whole: Manifest):
    config = stopped_between_chunks(tmp_path)
    path = prepared_folder(config) / WORK_FOLDER / STATE_NAME
    state = read_json(path)
    assert state.pop("commits") == {}
    write_json(path, state)
    assert prepare(config) == whole


@pytest.mark.slow
def test_a_spill_file_is_its_chunk_sorted_by_key_written_with_little_memory_beside_the_rows(tmp_path: Path):
    def tables() -> list[pa.Table]:
        ids = [[row % 7] * 200 for row in range(500)]
        return [shards.token_table(np.arange(500) + 500 * n, ids, ids, (100, 100)) for n in range(80)]

    before = pa.default_memory_pool()
    pa.set_memory_pool(COUNTED)
    try:
        shards.write_spill(rows := tables(), tmp_path / "spill.parquet", 1, 0, 0)
        assert COUNTED.max_memory() < 1.7 * sum(table.nbytes for table in rows)
    finally:
        pa.set_memory_pool(before)
    keys = random_generator(1, shards.PURPOSE_SHUFFLE, 0, 0).integers(shards.KEY_LIMIT, size=40_000)
    plain = pa.concat_tables(tables()).append_column("key", pa.array(keys)).sort_by("key")
    with pq.ParquetFile(tmp_path / "spill.parquet") as file:
        assert file.read().equals(plain)
        assert {file.metadata.row_group(n).num_rows for n in range(9)} == {shards.SPILL_ROW_GROUP_ROWS}


def test_a_changed_text_under_an_unfinished_folder_is_refused(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, 3, after=True)
        with pytest.raises(Stopped):
            prepare(config)
    write_text(tmp_path, PAIRS[:400])
    with pytest.raises(DataError, match=r"train\.files"):
        prepare(config)
