"""Any number of processes make one corpus together: the same, each part once, whoever of them dies."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from prepare_helpers import NUM_TRAIN, PAIRS, SMALL, config_of, mixture_of, write_text
from running import Command

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare import chunks, duplicates
from dist_transformer.data.prepare.claims import ChunkClaims, Work, WorkFinishedError, chunk_unit
from dist_transformer.data.prepare.preparation import LOCK_NAME, prepare, prepared_folder
from dist_transformer.data.prepare.progress import prepare_with_progress
from dist_transformer.errors import EXIT_REQUEUE, UserError

PROCESSES = multiprocessing.get_context("spawn")
NUM_PROCESSES = 3
SECONDS = 120


def config_in(folder: Path) -> Config:
    write_text(folder, [*PAIRS[:200], *PAIRS[NUM_TRAIN : NUM_TRAIN + 2], *PAIRS[200:480], *PAIRS[:18]])
    other = {"source": "validation.en", "target": "validation.de"}
    corpora = mixture_of(text={"source": "train.en", "target": "train.de"}, other=other)
    # The validation sentences stay in; rows 0 and 1 of `other` repeat rows of `text`, whoever reads which chunk.
    rules = {"held_out": False, "duplicates": True}
    return config_of(folder, data={**corpora, "filters": {"rules": rules}})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """What one process makes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, rows in SMALL.items():
            patch.setattr(chunks, name, rows)
        return prepare(config_in(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_that_keeps_no_locks_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"its disk keeps no file locks .*; give data\.prepared or --output there"):
        prepare_with_progress(config_in(tmp_path))


def work_in(config: Config, meet_at: str, victim: bool, barrier: Any, made: Any) -> None:
    """One of the processes: at its first unit of the kind `meet_at` it waits for the others to have one, too.

    A victim is killed there, with the files of its unit written and its result not.
    """
    for name, rows in SMALL.items():
        setattr(chunks, name, rows)
    duplicates.PARTITION_HASHES = 100
    finish = Work.finish
    met = False

    def finish_together(work: Work, unit: str, result: Any) -> None:
        nonlocal met
        if unit.startswith(meet_at) and not met:
            met = True
            barrier.wait(SECONDS)
            if victim:
                os.kill(os.getpid(), signal.SIGKILL)
        finish(work, unit, result)
        made.put((os.getpid(), unit))

    Work.finish = finish_together  # type: ignore[method-assign]
    prepare(config)


def prepared_together(config: Config, meet_at: str, num_victims: int = 0) -> tuple[list[int | None], list[Any]]:
    """Exit codes of the processes, and (process, unit) of every unit that was finished."""
    barrier, made = PROCESSES.Barrier(NUM_PROCESSES), PROCESSES.SimpleQueue()
    processes = [
        PROCESSES.Process(target=work_in, args=(config, meet_at, number < num_victims, barrier, made))
        for number in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    units = []
    while not made.empty():
        units.append(made.get())
    return [process.exitcode for process in processes], units


@pytest.mark.slow
@pytest.mark.parametrize("meet_at", ["text-chunk", "text-range", "+repeated"])
def test_three_processes_share_the_work_and_make_what_one_makes(tmp_path: Path, alone: Manifest, meet_at: str):
    config = config_in(tmp_path)
    codes, made = prepared_together(config, meet_at)
    assert codes == [0] * NUM_PROCESSES
    assert Manifest.load(prepared_folder(config)) == alone
    assert set(Counter(unit for _, unit in made).values()) == {1}
    assert len({process for process, unit in made if unit.startswith(meet_at)}) == NUM_PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("meet_at", ["text-chunk", "text-range"])
@pytest.mark.parametrize("num_victims", [1, 2])
def test_what_a_killed_process_was_at_is_made_by_another(
    tmp_path: Path, alone: Manifest, meet_at: str, num_victims: int
):
    config = config_in(tmp_path)
    codes, made = prepared_together(config, meet_at, num_victims)
    assert sorted(codes, key=str) == [*[-signal.SIGKILL] * num_victims, *[0] * (NUM_PROCESSES - num_victims)]
    folder = prepared_folder(config)
    assert Manifest.load(folder) == alone
    assert set(Counter(unit for _, unit in made).values()) == {1}
    assert not list(folder.rglob(".*.tmp"))


def test_a_unit_belongs_to_one_until_it_is_done_or_given_up(tmp_path: Path):
    ours, theirs = Work(tmp_path), Work(tmp_path)
    lock = ours.claim("unit")
    assert lock is not None
    assert theirs.claim("unit") is None
    assert not theirs.is_free("unit")
    lock.release()
    with theirs.claimed("unit") as is_theirs:
        assert is_theirs
        assert ours.claim("unit") is None
        theirs.finish("unit", [1, 2])
    assert ours.claim("unit") is None
    assert ours.is_done("unit")
    assert ours.result("unit") == [1, 2]


def test_a_reader_takes_the_chunks_that_are_free_when_it_comes_by(tmp_path: Path):
    work = Work(tmp_path)
    work.finish(chunk_unit("train", 0), "done")
    lock = Work(tmp_path).claim(chunk_unit("train", 2))
    assert lock is not None
    claims = ChunkClaims(work, "train", chunk_rows=20)
    assert [row for row in range(0, 80, 10) if claims.wants(row)] == [20, 30, 60, 70]
    assert claims.num_chunks == 4
    assert claims.unfinished == (1, 3)
    claims.finish(1, "done")
    claims.close()
    assert work.is_done(chunk_unit("train", 1))
    assert work.is_free(chunk_unit("train", 3))


def test_who_comes_late_to_a_completed_folder_is_told_and_makes_nothing(tmp_path: Path, alone: Manifest):
    work = Work(tmp_path)
    work.finish("unit", 1)
    assert work.is_done("unit")
    alone.save(tmp_path)
    (work.folder / "unit.json").unlink()
    with pytest.raises(WorkFinishedError):
        work.result("unit")
    for _ in range(2):  # its lock is given back
        with pytest.raises(WorkFinishedError):
            work.claim("other unit")


def start_prepare(command: Command, prepared: Path, corpora: dict[str, str], processes: int) -> "subprocess.Popen[str]":
    mixture = f"data.mixture={{corpora: {{{', '.join(f'{name}: {corpus}' for name, corpus in corpora.items())}}}}}"
    arguments = ("prepare", "small.yaml", "data.train=null", mixture, f"data.prepared={prepared}")
    return command.start(*arguments, "--processes", processes)


@pytest.mark.slow
def test_further_processes_of_the_command_help_and_change_nothing(command: Command, tmp_path: Path):
    text = "{source: train.en, target: train.de}"
    digests = set()
    for number in (1, 3):
        process = start_prepare(command, tmp_path / str(number), dict.fromkeys(("one", "two", "three"), text), number)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        digests.add(Manifest.load(tmp_path / str(number)).digest)
        assert all(f"| {name} " in out for name in ("one", "two", "three"))
    assert len(digests) == 1


@pytest.mark.slow
def test_who_waits_for_another_process_says_so(command: Command, tmp_path: Path):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    with FileLock(prepared / LOCK_NAME):
        process = start_prepare(command, prepared, {"one": "{source: train.en, target: train.de}"}, 1)
        assert process.stderr is not None
        assert process.stderr.readline() == f"waiting for another process that prepares {prepared} too\n"
        assert process.poll() is None
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_helpers_end_with_the_command(command: Command, tmp_path: Path, number: signal.Signals):
    prepared = tmp_path / "prepared"
    process = start_prepare(command, prepared, dict.fromkeys(("one", "two"), "{demo: train}"), 2)
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and len(list((prepared / "work" / "locks").glob("*.lock"))) < 2:
        assert time.monotonic() < deadline, "two processes at work"
        time.sleep(0.02)
    os.kill(process.pid, number)
    # Their output is the same as ours: it ends when the last of them has ended.
    _, err = process.communicate(timeout=SECONDS)
    if number != signal.SIGKILL:
        assert process.returncode == EXIT_REQUEUE, err
        assert "stopped while preparing the corpus" in err
    assert (prepared / "work" / "state.json").exists()
    assert not (prepared / "manifest.json").exists()
