"""Damaged shards and failing remotes under the real command on two ranks: all end, or all go on with the same batches."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import Command, records, with_constants

from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.errors import EXIT_HANG

pytestmark = pytest.mark.slow

FAULTY_FOLDER = Path(__file__).resolve().parents[1] / "faulty_filesystem"
DAMAGED_GROUPS = (0, 4, 8)
QUARANTINE = ("data.on_bad_row_group=quarantine", "data.max_quarantined_row_groups=100")
TWICE = with_constants({"data.sources.retries.READ_ATTEMPTS": 2})
"""Reads of a damaged file are repeated once, not for 12 seconds."""
AUDIT = "data.audit=true"
WARMUP = "schedule.warmup_steps=1"


@pytest.fixture(scope="module")
def prepared(command: Command) -> Path:
    folder = command.folder / "whole"
    command("prepare", "small.yaml", f"data.prepared={folder}")
    return folder


@pytest.fixture(scope="module")
def damaged(prepared: Path) -> Path:
    """A copy of the prepared folder; four bytes are flipped in some row groups of its training shard."""
    folder = prepared.with_name("damaged")
    shutil.copytree(prepared, folder)
    (path,) = folder.glob("shards/train-*.parquet")
    content = bytearray(path.read_bytes())
    metadata = pq.ParquetFile(path).metadata
    for group in DAMAGED_GROUPS:
        column = metadata.row_group(group).column(metadata.num_columns - 1)
        end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
        content[end - 8 : end - 4] = bytes(byte ^ 0xFF for byte in content[end - 8 : end - 4])
    path.write_bytes(content)
    return folder


def copy_of(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(name)))


def batches(run: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["batch_digest"]) for record in records(run)]


def audited(run: Path) -> list[dict[str, list[int]]]:
    """The row ids of each step by lane."""
    return [record["rows"] for record in records(run, "batch", "audit.jsonl")]


def assert_one_message(said: str, text: str) -> None:
    """The command ended with this text, for all ranks together."""
    assert "Traceback" not in said
    (message,) = [line for line in said.splitlines() if line.startswith("dist-transformer: ")]
    assert text in message


@pytest.fixture(scope="module")
def undisturbed(train_small: Callable[..., Path], damaged: Path) -> Path:
    """22 steps, more than an epoch, on two ranks in one go without the damaged row groups."""
    return train_small(
        "faults_undisturbed",
        f"data.prepared={damaged}",
        *QUARANTINE,
        AUDIT,
        WARMUP,
        "training.max_steps=22",
        ranks=2,
        **TWICE,
    )


def test_damaged_row_groups_are_left_out_named_and_counted_and_no_other_row_is(undisturbed, damaged, command):
    (shard,) = damaged.glob("shards/train-*.parquet")
    file = pq.ParquetFile(shard)
    whole = [group for group in range(file.num_row_groups) if group not in DAMAGED_GROUPS]
    expected = file.read_row_groups(whole, columns=["row_id"]).column("row_id").to_pylist()
    steps = [record for record in records(undisturbed) if record["epoch"] == 0]
    rows = [row for lanes in audited(undisturbed)[: len(steps)] for lane in lanes.values() for row in lane]
    assert sorted(rows) == sorted(expected)
    assert steps[-1]["quarantined_row_groups"] >= len(DAMAGED_GROUPS)
    log = (undisturbed / "train.log").read_text(encoding="utf-8")
    for group in DAMAGED_GROUPS:
        assert f"row group {group} of {shard} (could not verify page integrity, CRC checksum" in log
    assert "none repeated; rows dropped by filters or in quarantine are not" in command(
        "data", "audit", undisturbed, **TWICE
    )


def test_stops_and_other_numbers_of_ranks_change_nothing_of_what_is_left_out(train_small, undisturbed, damaged):
    settings = (f"data.prepared={damaged}", *QUARANTINE, AUDIT, WARMUP)
    for max_steps, num_ranks in ((2, 2), (13, 1), (22, 3)):
        run = train_small("faults_resumed", *settings, f"training.max_steps={max_steps}", ranks=num_ranks, **TWICE)
    assert batches(run) == batches(undisturbed)
    assert audited(run) == audited(undisturbed)
    assert records(run)[-1]["quarantined_row_groups"] == records(undisturbed)[-1]["quarantined_row_groups"]


def test_a_shard_mended_in_between_changes_no_window_that_was_begun(train_small, damaged, prepared):
    folder = copy_of(damaged, "mended")
    settings = (f"data.prepared={folder}", *QUARANTINE, WARMUP, "data.window_rows=600")  # a lane is one window
    in_one_go = train_small("faults_kept", *settings, "training.max_steps=4", ranks=2, **TWICE)
    train_small("faults_mended", *settings, "training.max_steps=2", ranks=2, **TWICE)
    shutil.copytree(prepared / "shards", folder / "shards", dirs_exist_ok=True)
    run = train_small("faults_mended", *settings, "training.max_steps=4", ranks=2, **TWICE)
    assert batches(run) == batches(in_one_go)
    assert records(run)[-1]["quarantined_row_groups"] == records(in_one_go)[-1]["quarantined_row_groups"] > 0


def test_a_damaged_row_group_ends_all_ranks_with_one_message(command: Command, damaged):
    said = command(
        "train", "small.yaml", "run.name=faults_raised", f"data.prepared={damaged}", "training.max_steps=22",
        "--ranks", 2, code=2, **TWICE,
    )  # fmt: skip
    assert_one_message(said, "cannot be read (could not verify page integrity, CRC checksum verification failed")
    assert (
        f"delete {damaged} and run `dist-transformer prepare` again, or set data.on_bad_row_group: quarantine" in said
    )


def test_more_left_out_than_allowed_ends_all_ranks_with_one_message(command: Command, damaged):
    said = command(
        "train", "small.yaml", "run.name=faults_limit", f"data.prepared={damaged}", *QUARANTINE,
        "data.max_quarantined_row_groups=1", "training.max_steps=22", "--ranks", 2, code=2, **TWICE,
    )  # fmt: skip
    assert_one_message(
        said, "row groups could not be read and were quarantined, more than data.max_quarantined_row_groups = 1"
    )


def write_parquet(path: Path) -> None:
    path.parent.mkdir()
    pairs = list(islice(demo_pairs("train"), 600))
    table = pa.table({"en": [source for source, _ in pairs], "de": [target for _, target in pairs]})
    pq.write_table(table, path, row_group_size=64)


def train_on(file: str) -> str:
    return f"data.train={{source: null, target: null, path: '{file}'}}"


def test_a_slow_remote_that_fails_now_and_then_feeds_loader_processes_as_the_disk_does(
    train_small, command: Command, tmp_path
):
    local, remote = tmp_path / "local/train.parquet", tmp_path / "remote/train.parquet"
    for path in (local, remote):
        write_parquet(path)
    faults = {"train.parquet": {"failures": 2, "delay_seconds": 0.01}}
    (remote.parent / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
    settings = ("data.on_the_fly=true", "training.max_steps=12")
    expected = train_small("faults_local", train_on(str(local)), *settings)
    said = command(
        "train", "small.yaml", "run.name=faults_remote", train_on(f"faulty://{remote}"), *settings,
        "data.loader_workers=1", "--ranks", 2, PYTHONPATH=str(FAULTY_FOLDER),
    )  # fmt: skip
    assert "the remote did not answer in time; attempt 1 of 8" in said
    assert batches(command.folder / "runs/faults_remote") == batches(expected)


HANGING_DISK = """
import threading
import dist_transformer.data.loader.row_groups

dist_transformer.data.loader.row_groups.open_parquet = lambda file: threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("overrides", "doing"),
    [
        ([], "reading the validation corpus"),
        (["data.validation=null", "data.loader_workers=1"], "reading the first windows"),
    ],
)
def test_a_disk_that_hangs_from_the_start_ends_the_run_by_the_watchdog(command: Command, tmp_path, overrides, doing):
    (tmp_path / "sitecustomize.py").write_text(HANGING_DISK, encoding="utf-8")  # no real disk hangs on request
    settings = ("run.name=faults_hanging", *overrides, "training.hang_seconds=4")
    command("prepare", "small.yaml", *settings)
    said = command("train", "small.yaml", *settings, code=EXIT_HANG, PYTHONPATH=str(tmp_path))
    assert f"while {doing}; " in said
    assert "where each thread stands" in said
