"""Saves in the background: what was there at `begin` is what a whole checkpoint holds, or nothing is there."""

import errno
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_helpers import RUN_ID, SHAPES, MemoryEngine, ThreadRanks, contents, folders, on_ranks, save, state_of
from safetensors import SafetensorError
from typer.testing import CliRunner

from dist_transformer import files
from dist_transformer.cli.main import app
from dist_transformer.errors import CheckpointError, MachineError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import async_writer, checkpoints, tensor_files
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.checkpoint.saver import CheckpointSaver
from dist_transformer.training.checkpoint.tensor_files import Weights, file_bit_sum, file_name, write_state_file
from dist_transformer.training.engine.bit_sums import bit_sum

NO_SPACE = OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(async_writer, "SECONDS_BETWEEN_ATTEMPTS", 0.0)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def saver_of(run_dir, ranks, progress=lambda doing: None):
    run_dir.path.mkdir(exist_ok=True)
    return AsyncWriter(run_dir, ranks, progress)


def alone(work):
    """Runs `work` on one rank."""
    return on_ranks(1, work)[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])  # of 8 ranks some hold nothing of a small tensor
def test_what_ranks_save_together_is_the_whole_state(run_dir, num_ranks):
    for saved in save(run_dir, 5, num_ranks):
        assert (saved.problem, saved.was_there) == (None, False)
    found = checkpoints.newest_complete(run_dir, RUN_ID)
    other, expected = MemoryEngine(99), MemoryEngine(5)
    checkpoints.load(found, other)
    assert other.loaded_step == 5
    for part, tensors in expected.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(other.tensors[part][name], tensor)
    assert (run_dir.checkpoints / "latest").read_text(encoding="utf-8") == "step_00000005\n"


def test_one_rank_looks_at_the_files_of_all_and_slow_writing_is_progress_of_all(run_dir, monkeypatch):
    write, standing, looked, told = async_writer.write_state_file, async_writer._Writer.standing, set(), Counter()
    is_seen = threading.Event()

    def slowly(path, *rest):
        if path.name != file_name(0):
            with path.with_name(f".{path.name}").open("wb", buffering=0) as hidden:
                for _ in range(400):
                    hidden.write(bytes(1 << 16))
                    if is_seen.wait(0.05):
                        break
            (path.with_name(f".{path.name}")).unlink()
        write(path, *rest)

    def work(ranks):
        def progress(doing):
            told[ranks.rank] += doing.startswith("writing")
            if min(told[rank] for rank in range(3)) > 4:
                is_seen.set()

        saver = saver_of(run_dir, ranks, progress)
        saver.begin(MemoryEngine(5, ranks.rank, 3), state_of(5))
        return saver.finish()

    monkeypatch.setattr(async_writer, "write_state_file", slowly)
    monkeypatch.setattr(async_writer, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(
        async_writer._Writer, "standing", lambda self, looks: looked.add((self.name, looks)) or standing(self, looks)
    )
    assert [saved.problem for saved in on_ranks(3, work)] == [None] * 3
    assert is_seen.is_set()
    assert {name for name, looks in looked if looks} == {f"writes {file_name(0)}"}


def test_training_goes_on_while_it_is_written_and_changes_nothing_of_it(run_dir, monkeypatch):
    may_write, write = threading.Event(), async_writer.write_state_file

    def waits(*arguments):
        assert may_write.wait(120)
        write(*arguments)

    monkeypatch.setattr(async_writer, "write_state_file", waits)

    def work(ranks):
        engine, one, pairs = MemoryEngine(5), saver_of(run_dir, ranks), Counter(a=1)
        one.begin(engine, state_of(5, interval={"pairs": pairs}))
        assert one.is_writing()
        for tensors in engine.tensors.values():
            for tensor in tensors.values():
                tensor += 1
        pairs["a"] += 1
        assert folders(run_dir) == ["step_00000005.tmp"]
        may_write.set()
        assert one.finish().path == run_dir.checkpoints / "step_00000005"
        assert not one.is_writing()

    alone(work)
    weights = Weights(run_dir.checkpoints / "step_00000005")
    assert all(torch.equal(weights[name], tensor) for name, tensor in MemoryEngine(5).tensors["weight"].items())
    assert read_json(run_dir.checkpoints / "step_00000005" / "state.json")["interval"] == {"pairs": {"a": 1}}


def test_the_records_are_on_disk_before_the_checkpoint_is_complete(run_dir):
    seen = []

    def work(ranks):
        saver = CheckpointSaver(
            saver_of(run_dir, ranks),
            MemoryEngine(5),
            lambda: seen.append(folders(run_dir)),
            lambda step, path, seconds: seen.append(path.name),
            lambda seconds: None,
        )
        saver.save_last(5, lambda: state_of(5))

    alone(work)
    assert seen == [["step_00000005.tmp"], "step_00000005"]


def test_the_time_of_a_save_ends_with_the_file_and_not_when_training_asks_for_it(run_dir):
    def work(ranks):
        one = saver_of(run_dir, ranks)
        one.begin(MemoryEngine(5), state_of(5))
        flight = one._pending
        flight.writer.join()
        flight.began -= 1000.0
        while time.monotonic() <= flight.writer.ended:
            pass
        return one.finish().seconds, flight.writer.ended - flight.began

    measured, expected = alone(work)
    assert measured == expected


def test_the_copy_is_allocated_once(run_dir, monkeypatch):
    def work(ranks):
        one, engine = saver_of(run_dir, ranks), MemoryEngine(1)
        places = []
        for step in (1, 2):
            one.begin(engine, state_of(step))
            places.append({key: values.data_ptr() for key, values in one._staging.fragments.items()})
            one.finish()
        assert places[0] == places[1]

    alone(work)


def test_only_one_save_is_in_flight(run_dir):
    def work(ranks):
        one = saver_of(run_dir, ranks)
        one.begin(MemoryEngine(1), state_of(1))
        with pytest.raises(AssertionError, match="in flight"):
            one.begin(MemoryEngine(1), state_of(2))
        one.finish()

    alone(work)


def test_a_checkpoint_that_an_earlier_start_wrote_is_left_as_it_is(run_dir):
    save(run_dir, 5)
    before = contents(run_dir.checkpoints)
    for saved in save(run_dir, 5, num_ranks=3):
        assert saved.was_there
        assert saved.path == run_dir.checkpoints / "step_00000005"
    assert contents(run_dir.checkpoints) == before


def test_another_runs_checkpoint_of_that_step_is_set_aside(run_dir):
    save(run_dir, 5, run_id="another")
    save(run_dir, 5)
    assert checkpoints.newest_complete(run_dir, RUN_ID).state["run_id"] == RUN_ID
    assert folders(run_dir) == ["step_00000005", "step_00000005.damaged"]


def fails_first(monkeypatch, times, error, rank=1):
    """The disk of one rank refuses its file so often."""
    write, refusals = safetensors.torch.serialize_file, []

    def refuse(tensors, path, **others):
        if path.name == f"state_{rank}.safetensors" and len(refusals) < times:
            refusals.append(path)
            path.write_bytes(b"torn")
            raise error
        write(tensors, path, **others)

    monkeypatch.setattr(safetensors.torch, "serialize_file", refuse)


@pytest.mark.parametrize("error", [NO_SPACE, SafetensorError("Error while serializing: I/O error")])
def test_a_save_that_fails_on_one_rank_is_written_again_by_all(run_dir, monkeypatch, caplog, error):
    fails_first(monkeypatch, 2, error)
    results = save(run_dir, 5, save_attempts=3)
    assert {saved.path for saved in results} == {run_dir.checkpoints / "step_00000005"}
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 5
    attempts = [message for message in caplog.messages if f"rank 1: state_1.safetensors: {error}" in message]
    assert len(attempts) == 2
    assert attempts[0].endswith("attempt 2 of 3 follows")


def test_a_save_that_never_succeeds_is_given_up_on_all_ranks_and_leaves_the_older_ones(run_dir, monkeypatch):
    save(run_dir, 4)
    fails_first(monkeypatch, 3, NO_SPACE)
    first, second = save(run_dir, 5, save_attempts=3)
    assert first.problem == second.problem
    for said in (
        "rank 1: state_1.safetensors",
        "No space left",
        "attempts: 3",
        "resume from step_00000004",
        "Free space",
    ):
        assert said in first.problem
    assert folders(run_dir) == ["step_00000004"]
    assert save(run_dir, 5)[0].problem is None  # the next one can be written


@pytest.mark.parametrize("failures", [1, 10**6])
def test_a_flush_that_fails_after_the_rename_leaves_the_checkpoint_where_it_is(run_dir, monkeypatch, caplog, failures):
    flush, left = async_writer.flush_to_disk, [failures]

    def fails(path):
        if path == run_dir.checkpoints and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        flush(path)

    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(async_writer, "flush_to_disk", fails)
    for saved in save(run_dir, 5, save_attempts=3):
        assert (saved.path, saved.problem) == (run_dir.checkpoints / "step_00000005", None)
    assert folders(run_dir) == ["step_00000005"]
    assert "attempt 2" not in caplog.text
    assert ("is written, but could not be flushed" in caplog.text) == (failures > 1)


def test_a_rename_that_was_done_is_found_by_the_next_attempt_where_its_error_hid_it(run_dir, monkeypatch):
    rename, read, errors = Path.rename, async_writer.read_json_patiently, []

    def renames_and_fails(path, target):
        rename(path, target)
        if target.name == "step_00000005":
            errors.append(MachineError("cannot be read now"))
            raise OSError(errno.EIO, "Input/output error")

    def cannot_read_then(path):
        if errors:
            raise errors.pop()
        return read(path)

    monkeypatch.setattr(Path, "rename", renames_and_fails)
    monkeypatch.setattr(async_writer, "read_json_patiently", cannot_read_then)
    assert {saved.problem for saved in save(run_dir, 5, save_attempts=2)} == {None}
    assert folders(run_dir) == ["step_00000005"]
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 5


def test_too_little_space_is_known_before_anything_is_written(run_dir, monkeypatch):
    monkeypatch.setattr(async_writer, "write_state_file", lambda *arguments: pytest.fail("wrote"))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(async_writer.shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    (problem,) = {saved.problem for saved in save(run_dir, 5)}
    assert f"1.0 MB are free on {run_dir.checkpoints}" in problem
    assert "there is no earlier checkpoint" in problem


def test_the_space_asked_for_is_what_the_files_need(run_dir, monkeypatch):
    asked, prepare = [], async_writer._prepare
    monkeypatch.setitem(SHAPES, "large", (1000, 1000))

    def note(temporary, needed_bytes):
        asked.append(needed_bytes)
        return prepare(temporary, needed_bytes)

    monkeypatch.setattr(async_writer, "_prepare", note)
    save(run_dir, 5, num_ranks=3)
    written = sum(path.stat().st_size for path in run_dir.checkpoints.glob("step_*/state_*"))
    assert written <= asked[0] <= written + async_writer.MARGIN_BYTES


def test_an_error_that_is_not_the_disks_is_raised_where_it_is_heard(run_dir, monkeypatch):
    fails_first(monkeypatch, 1, ZeroDivisionError("ours"), rank=0)
    with pytest.raises(ZeroDivisionError, match="ours"):
        save(run_dir, 5, num_ranks=1)
    assert not checkpoints.saved(run_dir)


def test_a_rank_whose_files_the_first_one_does_not_see_is_named(run_dir, monkeypatch):
    write = async_writer.write_state_file
    elsewhere = run_dir.path / "elsewhere"
    elsewhere.mkdir(parents=True)

    def on_its_own_disk(path, fragments, starts):
        write(path, fragments, starts)
        if path.name == "state_1.safetensors":
            path.rename(elsewhere / path.name)
            path.symlink_to(elsewhere / path.name)

    commit = async_writer._commit
    monkeypatch.setattr(async_writer, "write_state_file", on_its_own_disk)
    monkeypatch.setattr(
        async_writer, "_commit", lambda *a: (shutil.rmtree(elsewhere, ignore_errors=True), commit(*a))[1]
    )
    (problem,) = {saved.problem for saved in save(run_dir, 5)}
    assert "state_1.safetensors cannot be read" in problem
    assert "on a disk that all nodes share" in problem


def test_a_stalled_disk_is_no_progress_on_any_rank(run_dir, monkeypatch):
    """What the watchdog hears while one rank's disk does not move, and again when it does."""
    looked, may_write, write = [], threading.Event(), async_writer.write_state_file
    heard, has_begun = {0: [], 1: []}, threading.Event()

    def stalls(path, fragments, starts):
        assert path.name == "state_0.safetensors" or may_write.wait(120)
        write(path, fragments, starts)
        has_begun.set()

    monkeypatch.setattr(async_writer, "write_state_file", stalls)
    monkeypatch.setattr(async_writer, "LOOK_SECONDS", 0.001)
    gather = ThreadRanks.all_gather_object

    def counted(ranks, value):
        if has_begun.is_set() and "writes state_0.safetensors" not in {each.name for each in threading.enumerate()}:
            looked.append(len(heard[0]))  # since the other rank's file is written, however long its disk took
        if len(looked) >= 400:  # both ranks append to it
            may_write.set()
        return gather(ranks, value)

    monkeypatch.setattr(ThreadRanks, "all_gather_object", counted)

    def work(ranks):
        one = saver_of(run_dir, ranks, progress=heard[ranks.rank].append)
        one.begin(MemoryEngine(5, ranks.rank, 2), state_of(5))
        one.finish()

    on_ranks(2, work)
    assert looked[100] == looked[390]  # some 150 looks without a word
    assert heard[0].count("writing checkpoint step_00000005") > 1  # it moved again
    assert heard[1][-1] == "after checkpoint step_00000005"


def test_a_file_is_not_mapped_while_a_save_reads_it_back(tmp_path, monkeypatch):
    """An error of the disk under a mapping ends the process; of a read it is an OSError, and the save is tried again."""
    tensors = {"weight/small": torch.randn(3), "weight/large": torch.randn(2**20 + 5)}
    path, maps = tmp_path / file_name(0), []
    write_state_file(path, tensors, dict.fromkeys(tensors, 0))

    def looking(blocks):
        for block in blocks:
            maps.append(Path("/proc/self/maps").read_text())
            yield block

    monkeypatch.setattr(tensor_files, "bit_sum", lambda blocks: bit_sum(looking(blocks)))
    assert file_bit_sum(path) == int(bit_sum(tensors.values()))
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(OSError, match="is damaged"):
        file_bit_sum(path)
    assert maps
    assert path.name not in "".join(maps)


def test_a_copy_that_differs_from_the_engines_memory_is_no_checkpoint(run_dir, monkeypatch):
    take = async_writer.StagingBuffer.take

    def faulty(buffer, fragments):
        take(buffer, fragments)
        if fragments[0].start:  # on the second rank
            next(iter(buffer.fragments.values())).view(torch.int32)[0] ^= 1

    monkeypatch.setattr(async_writer.StagingBuffer, "take", faulty)
    results = save(run_dir, 5, save_attempts=2)
    assert all(saved.problem for saved in results)
    assert "rank 1: state_1.safetensors: differs from the state in memory" in results[0].problem
    assert folders(run_dir) == []


def test_a_load_that_ends_with_other_bits_is_a_fault_of_the_machine_and_sets_nothing_aside(run_dir, monkeypatch):
    save(run_dir, 5)
    engine, load = MemoryEngine(99), MemoryEngine.load

    def faulty(self, read, step):
        load(self, read, step)
        self.tensors["exp_avg"]["norm.gain"].view(torch.int32)[2] ^= 1 << 30

    monkeypatch.setattr(MemoryEngine, "load", faulty)
    with pytest.raises(MachineError, match=r"other bits than were saved \(exp_avg\), although its files are undamaged"):
        checkpoints.load(checkpoints.newest_complete(run_dir, RUN_ID), engine)
    assert folders(run_dir) == ["step_00000005"]


def test_parts_that_only_one_of_checkpoint_and_run_has_are_not_compared(run_dir):
    save(run_dir, 5, parts=("weight", "exp_avg"))
    checkpoints.load(checkpoints.newest_complete(run_dir, RUN_ID), MemoryEngine(99, parts=("weight",)))
    save(run_dir, 6, parts=("weight",))
    checkpoints.load(checkpoints.newest_complete(run_dir, RUN_ID), MemoryEngine(99))


def test_verify_names_the_damaged_checkpoints_and_changes_nothing(run_dir):
    for step in (5, 6):
        save(run_dir, step)
    call = CliRunner().invoke(app, ["verify", str(run_dir.path)])
    assert (call.exit_code, call.output.split()) == (0, ["step_00000005", "undamaged", "step_00000006", "undamaged"])
    file = run_dir.checkpoints / "step_00000006" / "state_1.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    before = contents(run_dir.checkpoints)
    call = CliRunner().invoke(app, ["verify", str(run_dir.path)])
    assert "step_00000006  state_1.safetensors: SHA-256 differs" in call.output
    assert isinstance(call.exception, CheckpointError)
    assert str(call.exception).startswith(f"{run_dir.path}: damaged: step_00000006. ")
    assert contents(run_dir.checkpoints) == before
    assert isinstance(CliRunner().invoke(app, ["verify", str(run_dir.path / "no")]).exception, UserError)


def test_verify_of_a_folder_without_a_checkpoint_is_refused_and_says_what_was_purged(run_dir):
    run_dir.checkpoints.mkdir(parents=True)
    expected = f"{run_dir.path}: has no checkpoint to verify; expected a run folder with checkpoints/step_..."
    assert verify_error(run_dir) == expected
    write_json(run_dir.state, {"step": 6})
    assert verify_error(run_dir) == f"{expected}, although run.json says that step 6 was saved: was it purged?"


def verify_error(run_dir):
    error = CliRunner().invoke(app, ["verify", str(run_dir.path)]).exception
    assert isinstance(error, UserError)
    return str(error)
