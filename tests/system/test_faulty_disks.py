"""Runs whose folder is on a disk that is late, fails or tells old things (a real FUSE file system): each ends with the
weights of a run on a good disk, or with one message that names what happened, and then resumes to them."""

import errno
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuse_disk import FuseDisk, fault, require_fuse
from running import PROGRAM, Command, records, with_constants

from dist_transformer.errors import EXIT_FAILED, EXIT_USER_ERROR
from dist_transformer.run.metrics_log import MetricsLog, read_records

pytestmark = pytest.mark.slow
SETTINGS = ("schedule.warmup_steps=2", "data.audit=true")
CHECKPOINTS = "*/checkpoints*"
NEW_CHECKPOINT = "*/checkpoints/step_0000000?"
"""The name that the last rename of a save gives."""
LAST = "checkpoints/step_00000006"


@pytest.fixture(scope="module", autouse=True)
def fuse() -> None:
    require_fuse()


@pytest.fixture(scope="module")
def prepared(command: Command) -> Path:
    folder = command.folder / "prepared"
    command("prepare", "small.yaml", f"data.prepared={folder}")
    return folder


@pytest.fixture(scope="module")
def undisturbed(command: Command, prepared: Path) -> Path:
    """Six steps in one go on a good disk."""
    command("train", "small.yaml", "run.name=undisturbed", f"data.prepared={prepared}", *SETTINGS)
    return command.folder / "runs/undisturbed"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FuseDisk]:
    (tmp_path / "real").mkdir()
    with FuseDisk(tmp_path / "real", tmp_path / "disk").mounted() as mounted:
        yield mounted


def run_of(disk: FuseDisk) -> Path:
    return disk.path / "runs/a"


def arguments(disk: FuseDisk, prepared: Path, *overrides: str) -> tuple[str, ...]:
    given = ("run.name=a", f"run.root={disk.path}/runs", f"data.prepared={prepared}", *SETTINGS)
    return ("train", "small.yaml", *given, *overrides)


def batches(run: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["batch_digest"]) for record in records(run)]


def assert_as_undisturbed(run: Path, undisturbed: Path) -> None:
    """The same records, once each, and the same weights and moments to the bit; nothing else among the checkpoints."""
    assert batches(run) == batches(undisturbed)
    for file in ("audit.jsonl", "samples.jsonl"):
        rows = [[record.get("rows") for record in read_records(folder / file)] for folder in (run, undisturbed)]
        assert rows[0] == rows[1]
    state = f"{LAST}/state_0.safetensors"
    assert (run / state).read_bytes() == (undisturbed / state).read_bytes()
    assert (run / "model/model.safetensors").read_bytes() == (undisturbed / "model/model.safetensors").read_bytes()
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step_00000003", "step_00000006"]


WEATHERED: dict[str, list[dict[str, Any]]] = {
    "late": [fault("rename", delay_seconds=0.1), fault("write", "fsync", "readdir", "create", delay_seconds=0.01)],
    "ESTALE": [
        fault("open", path=f"{NEW_CHECKPOINT}/state_0.safetensors", error="ESTALE", times=2),
        fault("getattr", path=f"{NEW_CHECKPOINT}/manifest.json", error="ESTALE", times=2),
        fault("write", path="*/metrics.jsonl", error="ESTALE", times=2),
        fault("write", path="*/audit.jsonl", error="ESTALE", times=2),
        fault("create", path="*/.run.json.*", error="ESTALE", times=2),
    ],
    "EIO": [
        fault("fsync", path=f"{NEW_CHECKPOINT}.tmp/state_0.safetensors", error="EIO", times=1),
        fault("read", path=f"{NEW_CHECKPOINT}/state.json", error="EIO", times=1),
        fault("write", path="*/metrics.jsonl", error="EIO", times=2),
        fault("write", path="*/history.jsonl", error="EIO", times=2),
        fault("create", path="*/.owner.json.*", error="EIO", times=1),
        fault("rename", path="*/config.yaml", error="EIO", times=1),
    ],
    "ENOSPC": [
        fault("write", path=f"{NEW_CHECKPOINT}.tmp/*", error="ENOSPC", times=1),
        fault("mkdir", path=f"{NEW_CHECKPOINT}.tmp", error="ENOSPC", times=1),
        fault("write", path="*/metrics.jsonl", error="ENOSPC", times=2),
        fault("write", path="*/audit.jsonl", error="ENOSPC", times=2),
        fault("write", path="*/train.log", error="ENOSPC", times=2),
    ],
    "done, but answered by an error": [
        fault("rename", path=NEW_CHECKPOINT, error="ENOENT", times=1, after=True),
        fault("write", path="*/metrics.jsonl", error="EIO", times=2, after=True),
        fault("write", path="*/audit.jsonl", error="EIO", times=1, after=True),
        fault("rename", path="*/run.json", error="EIO", times=1, after=True),
    ],
}


@pytest.mark.parametrize("case", WEATHERED)
def test_a_disk_that_stutters_changes_nothing(command: Command, prepared, undisturbed, disk, case):
    met = []
    for max_steps in (3, 6):
        disk.set(*WEATHERED[case])
        said = command(*arguments(disk, prepared, f"training.max_steps={max_steps}"))
        assert "Traceback" not in said
        met += disk.met()
    disk.set()
    missed = [one for one in WEATHERED[case] if not any(_is_met(one, line) for line in met)]
    assert not missed, f"{missed} did not happen"
    assert_as_undisturbed(run_of(disk), undisturbed)


def _is_met(one: dict[str, Any], line: str) -> bool:
    error, operation, *_ = line.split()
    return error == one.get("error", "late") and (operation in one["on"] or one["on"] == ["*"])


def test_a_disk_that_fails_for_good_ends_each_start_with_one_message_and_costs_nothing(
    command: Command, prepared, undisturbed, disk
):
    first = arguments(disk, prepared, "training.max_steps=3")
    whole = arguments(disk, prepared)
    command(*first)
    checkpoint = "checkpoint of step 6 was given up: .*the run can resume from step_00000003"
    for what, code, message in (
        (fault("write", path=f"{CHECKPOINTS}.tmp/*", error="ENOSPC"), EXIT_FAILED, checkpoint),
        (fault("fsync", path=f"{CHECKPOINTS}.tmp/*", error="EIO"), EXIT_FAILED, checkpoint),
        (fault("rename", path=f"{CHECKPOINTS}/step_00000006", error="ESTALE"), EXIT_FAILED, checkpoint),
        (fault("read", path=f"{CHECKPOINTS}/state_0.safetensors", error="EIO"), EXIT_FAILED, "cannot be read now"),
        (fault("readdir", path=CHECKPOINTS, error="ESTALE"), EXIT_FAILED, "Stale file handle.* start again"),
        (fault("create", "mkdir", "write", error="ENOSPC"), EXIT_FAILED, "cannot be written"),
        (fault("*", error="EIO"), EXIT_FAILED, "cannot be written"),
    ):
        disk.set(what)
        said = command(*whole, code=code)
        assert disk.met()
        assert_one_message(said, message)
        disk.set()
        assert sorted(os.listdir(run_of(disk) / "checkpoints"))[:2] == ["latest", "step_00000003"]
    assert "resumed from" in command(*whole)
    assert_as_undisturbed(run_of(disk), undisturbed)


def assert_one_message(said: str, pattern: str) -> None:
    assert "Traceback" not in said
    (message,) = [line for line in said.splitlines() if line.startswith("dist-transformer: ")]
    assert re.search(pattern, message), message


def test_two_ranks_whose_disk_is_gone_during_a_save_end_with_one_message(command: Command, prepared, disk):
    """Rank 0 alone reads the folder then; the other learns of it, and is not left behind in a collective."""
    command(*arguments(disk, prepared, "training.max_steps=3"), "--ranks", 2)
    disk.set(fault("open", "read", "readdir", path=f"{CHECKPOINTS}/step_00000006.tmp*", error="ESTALE"))
    said = command(*arguments(disk, prepared), "--ranks", 2, code=EXIT_FAILED)
    assert_one_message(said, "checkpoint of step 6 was given up: ")
    assert "lost" not in said


ELSEWHERE = 'mount --make-rprivate / && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


def elsewhere(boot: Path) -> list[str]:
    """Starts a program as on another machine: one that was booted another time."""
    boot.write_text("00000000-0000-4000-8000-000000000000\n", encoding="ascii")
    return ["unshare", "--mount", "sh", "-c", ELSEWHERE, str(boot)]


def test_without_locks_between_machines_and_with_old_listings_one_run_trains_and_the_newest_checkpoint_is_found(
    command: Command, prepared, disk, tmp_path
):
    """A second machine sees the same disk; it keeps no locks between the two, and the second one's view is old."""
    real = tmp_path / "real/runs/a"
    real.mkdir(parents=True)
    quickly = with_constants({"run.lock.BEAT_SECONDS": 0.5})
    patiently = with_constants({"run.lock.BEAT_SECONDS": 5.0})  # of who may miss some beats of a living one
    endless = ("checkpoints.every_steps=10", "training.max_steps=1000000")
    with FuseDisk(tmp_path / "real", tmp_path / "other").mounted() as other:
        other.set(stale_seconds=3600)
        assert not run_of(other).joinpath("owner.json").exists()
        first = command.start(*arguments(disk, prepared, *endless), **quickly)
        try:
            wait_for_checkpoint(first, real, 10)
            assert not run_of(other).joinpath("owner.json").exists()  # as that machine remembers
            second = on(
                {**os.environ, **patiently},
                command,
                [*elsewhere(tmp_path / "boot"), *PROGRAM, *arguments(other, prepared, *endless)],
            )
            assert second.returncode == EXIT_USER_ERROR
            assert_one_message(second.stderr, "works on this run folder .*a run folder is for one job at a time")
            seen = sorted(os.listdir(run_of(other) / "checkpoints"))
            wait_for_checkpoint(first, real, newest(real) + 10)
        finally:
            first.kill()
            first.communicate()
        assert sorted(os.listdir(run_of(other) / "checkpoints")) == seen != sorted(os.listdir(real / "checkpoints"))
        end = newest(real) + 3
        ending = ("checkpoints.every_steps=10", f"training.max_steps={end}")
        third = on(
            {**os.environ, **quickly},
            command,
            [*elsewhere(tmp_path / "boot"), *PROGRAM, *arguments(other, prepared, *ending)],
        )
        assert third.returncode == 0, third.stderr
    assert f"start      step {end - 3}, resumed from" in third.stderr
    assert [step for step, _ in batches(real)] == [*range(1, end + 1)]


def on(environment: dict[str, str], command: Command, program: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(program, cwd=command.folder, env=environment, capture_output=True, text=True, timeout=300)


def newest(run: Path) -> int:
    names = os.listdir(run / "checkpoints") if (run / "checkpoints").is_dir() else []
    return max((int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdecimal()), default=0)


def wait_for_checkpoint(process: "subprocess.Popen[str]", run: Path, step: int) -> None:
    while newest(run) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_records_that_a_disk_does_not_take_for_long_are_all_there_once(disk, number, is_done):
    """More of them than a buffer of Python's holds."""
    log = MetricsLog(disk.path / "metrics.jsonl")
    log.append("train", 0, {})
    disk.set(fault("write", error=errno.errorcode[number], after=is_done))
    for step in range(1, 200):
        log.append("train", step, {"digest": "a" * 100})
    disk.set(fault("write", error=errno.errorcode[number], after=is_done, times=1))
    log.close()
    assert [record["step"] for record in read_records(log.path)] == [*range(200)]
