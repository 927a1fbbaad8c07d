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
from prepare_helpers import NUM_TRAIN, PAIRS, SMALL, config_of, read_split, write_text
from web_server import web_server

from dist_transformer.data.loader.window_request import random_generator
from dist_transformer.data.manifest import MANIFEST_NAME, Manifest
from dist_transformer.data.prepare import chunks, preparation, shards
from dist_transformer.data.prepare.claims import WAITING, WORK_FOLDER, Work
from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.data.prepare.progress import prepare_with_progress
from dist_transformer.data.prepare.state import STATE_NAME, PrepareState
from dist_transformer.data.recipe import not_held_out
from dist_transformer.data.sources import files, retries
from dist_transformer.errors import DataError, MachineError
from dist_transformer.files import read_json, write_json

COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())
"""Counts the memory of tables; lives as long as any of them."""
RECORDS = 12
"""Written for the small corpus: scan 1, tokenizer 1, chunks 4 + 1, ends of two corpora 2, ranges 3."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)


class Stopped(RuntimeError):
    """Stands for whatever ends a process."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """What an undisturbed preparation makes."""
    folder = tmp_path_factory.mktemp("whole")
    write_text(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, rows in SMALL.items():
            patch.setattr(chunks, name, rows)
        return prepare(config_of(folder))


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


def test_finished_units_are_not_made_again(tmp_path: Path, whole: Manifest, monkeypatch: pytest.MonkeyPatch):
    write_text(tmp_path)
    config = config_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, 4, after=True)
        with pytest.raises(Stopped):
            prepare(config)
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


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path)
    manifest = prepare(config)
    written = (prepared_folder(config) / MANIFEST_NAME).stat().st_mtime_ns
    stages: list[str] = []
    assert prepare(config, progress=lambda stage, done, total: stages.append(stage)) == manifest
    assert stages == []
    assert (prepared_folder(config) / MANIFEST_NAME).stat().st_mtime_ns == written


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


def test_the_default_folder_is_named_by_the_recipe(tmp_path: Path):
    write_text(tmp_path)
    folders = {prepared_folder(config_of(tmp_path)), prepared_folder(config_of(tmp_path, run={"seed": 4}))}
    folders.add(prepared_folder(config_of(tmp_path, tokenizer={"vocabulary_size": 248})))
    (tmp_path / "train.en").write_text("other\n")
    folders.add(prepared_folder(config_of(tmp_path)))
    assert len(folders) == 4


def in_fixed_folder(tmp_path: Path, **settings: object) -> dict[str, object]:
    return {**config_of(tmp_path).data.model_dump(), "prepared": str(tmp_path / "mine"), **settings}


def test_a_folder_of_another_recipe_is_refused_with_what_differs(tmp_path: Path):
    write_text(tmp_path)
    prepare(config_of(tmp_path, data=in_fixed_folder(tmp_path)))
    other = config_of(
        tmp_path, data=in_fixed_folder(tmp_path, filters={"max_tokens": 77}), tokenizer={"vocabulary_size": 248}
    )
    with pytest.raises(DataError, match="prepared with other settings") as error:
        prepare(other)
    assert "filters.max_tokens: 256 in the folder, 77 now" in str(error.value)
    assert "tokenizer.vocabulary_size: 240 in the folder, 248 now" in str(error.value)
    assert "seed" not in str(error.value)


def test_files_of_another_text_are_named_and_a_run_with_checkpoints_is_given_a_way(tmp_path: Path):
    for number in range(12):
        write_text(tmp_path, PAIRS[:100])
        for side in ("en", "de"):
            (tmp_path / f"train.{side}").rename(tmp_path / f"part{number:02}.{side}")
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path, train={"source": "part*.en", "target": "part*.de"}))
    prepare(config)
    for side in ("en", "de"):
        (tmp_path / f"part00.{side}").rename(tmp_path / f"part50.{side}")
    with (tmp_path / "part03.en").open("a") as file, (tmp_path / "part03.de").open("a") as other:
        print("one more", file=file)
        print("noch eins", file=other)
    with pytest.raises(DataError) as error:
        prepare(config)
    assert str(error.value).splitlines()[1:] == [
        "  training.train.files: 2 removed (part00.de, part00.en); 2 added (part50.de, part50.en); "
        "2 changed (part03.de, part03.en)",
        "Put it back; or set data.prepared to another folder, and for a run that has checkpoints another run.name; without "
        "such a run, the folder may be deleted and is prepared again.",
    ]
    for number in range(12):
        for side in ("en", "de"):
            (tmp_path / f"other{number:02}.{side}").write_bytes((tmp_path / f"part11.{side}").read_bytes())
    others = in_fixed_folder(tmp_path, train={"source": "other*.en", "target": "other*.de"})
    with pytest.raises(DataError, match=r"24 added \(other00\.de, .*, other04\.en\)"):
        prepare(config_of(tmp_path, data=others))


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


@pytest.mark.parametrize("name", ["train.de", "validation.en"])
def test_a_text_that_changes_while_it_is_prepared_is_refused_and_then_prepared_anew(
    tmp_path: Path, whole: Manifest, name: str
):
    write_text(tmp_path)
    config, text = config_of(tmp_path, data=in_fixed_folder(tmp_path)), (tmp_path / name).read_text(encoding="utf-8")

    def change(stage: str, done: int, total: int | None) -> None:
        if stage == "train" and done:
            (tmp_path / name).write_text(text.upper(), encoding="utf-8")

    with pytest.raises(DataError, match=rf"mine: its text changed while it was prepared:\n.*1 changed \({name}\)"):
        prepare(config, progress=change)
    assert not (tmp_path / "mine" / MANIFEST_NAME).exists()
    (tmp_path / name).write_text(text, encoding="utf-8")
    manifest = prepare(config)
    assert manifest.digest == whole.digest
    assert read_split(tmp_path / "mine", manifest, "train")[:9] == read_split(tmp_path / "mine", whole, "train")[:9]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_text_at_an_address_that_changes_while_it_is_prepared_is_refused(tmp_path: Path, ranges: bool):
    write_text(tmp_path)
    with web_server(tmp_path, ranges) as server:
        config = config_of(tmp_path, data=in_fixed_folder(tmp_path, root=server.address))

        def change(stage: str, done: int, total: int | None) -> None:
            if stage == "validation":
                write_text(tmp_path, PAIRS[:NUM_TRAIN][::-1])

        with pytest.raises(DataError, match=r"changed while it was prepared:\n.*2 changed \(train\.de, train\.en\)"):
            prepare(config, progress=change)


def test_a_preparation_ends_with_a_warning_if_the_server_of_its_text_does_not_answer_at_the_end(
    tmp_path: Path, whole: Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    write_text(tmp_path)
    with web_server(tmp_path) as server:
        data = in_fixed_folder(tmp_path, root=server.address)

        def fail(stage: str, done: int, total: int | None) -> None:
            server.failures = 1000 if stage == "report" else 0

        assert prepare(config_of(tmp_path, data=data), progress=fail).digest == whole.digest
    assert "whether its text has changed is not known" in caplog.text


def test_a_complete_folder_serves_without_the_text(tmp_path: Path):
    write_text(tmp_path)
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path))
    manifest = prepare(config)
    (tmp_path / "train.en").unlink()
    assert prepare(config) == manifest
    with pytest.raises(DataError, match=r"seed: 3 in the folder, 9 now"):
        prepare(config_of(tmp_path, data=in_fixed_folder(tmp_path), run={"seed": 9}))


def test_a_complete_folder_serves_while_its_text_at_an_address_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    write_text(tmp_path)
    with web_server(tmp_path) as server:
        data = in_fixed_folder(tmp_path, root=server.address)
        config = config_of(tmp_path, data=data)
        manifest = prepare(config)
        (tmp_path / "train.en").unlink()
        assert prepare(config) == manifest
        assert "used as it is; whether its text has changed is not known" in caplog.text
        assert "train.en: no such file" in caplog.text
        caplog.clear()
        with pytest.raises(DataError, match=r"train\.en: no such file.*\n.*data\.prepared=FOLDER"):
            prepare(config_of(tmp_path, data={**data, "prepared": None}))
    assert prepare(config) == manifest
    assert "ClientConnectorError" in caplog.text
    assert not_held_out(config.data, manifest.recipe) == []
    with pytest.raises(DataError, match=r"seed: 3 in the folder, 9 now"):
        prepare(config_of(tmp_path, data=data, run={"seed": 9}))
    with pytest.raises(MachineError, match=r"ClientConnectorError.*\n.*data\.prepared=FOLDER"):
        prepare(config_of(tmp_path, data={**data, "prepared": None}))


def test_a_local_text_that_contradicts_the_settings_is_refused_also_under_a_complete_folder(tmp_path: Path):
    write_text(tmp_path)
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").rename(tmp_path / f"part0.{side}")
    config = config_of(tmp_path, data=in_fixed_folder(tmp_path, train={"source": "part*.en", "target": "part*.de"}))
    prepare(config)
    (tmp_path / "part1.en").write_text("more\n")
    with pytest.raises(DataError, match="2 files fit the source, but 1 the target"):
        prepare(config)


def test_each_process_looks_into_each_file_once_and_the_last_at_the_end_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_text(tmp_path)
    looked_into: list[str] = []
    fingerprint = files.file_fingerprint
    monkeypatch.setattr(files, "file_fingerprint", lambda file: (looked_into.append(file), fingerprint(file))[1])
    for data in ({}, in_fixed_folder(tmp_path)):
        config = config_of(tmp_path, data={**config_of(tmp_path).data.model_dump(), **data})
        results = []
        for rank in ("", "", "0", "1"):
            monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
            looked_into.clear()
            results.append(prepare_with_progress(config))
            assert len(looked_into) == (4 if results[1:] else 8)
        assert all(result == results[0] for result in results)


def test_chunks_of_a_version_that_counted_no_unknown_tokens_are_taken(tmp_path: Path, whole: Manifest):
    write_text(tmp_path)
    config = config_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_record(patch, 4, after=True)
        with pytest.raises(Stopped):
            prepare(config)
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
