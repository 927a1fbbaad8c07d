"""Damage of every kind to every file of a checkpoint: never a silent load; the newest whole one is taken, or none."""

import errno
import os
import random
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoint_helpers import RUN_ID, contents, folders, rewrite, save
from safetensors.torch import save_file
from stuttering_disk import FOR_GOOD, stuttering

from dist_transformer import files
from dist_transformer.config.schema import CheckpointConfig, DivergenceConfig, TrainingConfig
from dist_transformer.config.yaml_positions import read_yaml
from dist_transformer.data.manifest import Manifest
from dist_transformer.errors import CheckpointError, MachineError
from dist_transformer.files import read_json, write_json
from dist_transformer.interop.model_folder import WEIGHTS, open_safetensors
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.training import rank, run_log
from dist_transformer.training.checkpoint import async_writer, checkpoints, retention
from dist_transformer.training.checkpoint.tensor_files import StateFiles
from dist_transformer.training.divergence import Diverged, read_recovery, recover

FILES = ("state_0.safetensors", "state_1.safetensors", "state.json", "manifest.json")
NEWEST = "step_00000003"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two runs with checkpoints of steps 2 and 3, written by two ranks: the second is another run."""
    folder = tmp_path_factory.mktemp("written")
    for name, run_id, seen in (("run", RUN_ID, 1), ("other", "fedcba9876543210", 2)):
        for step in (2, 3):
            save(RunDir(folder / name), step, run_id=run_id, total_target_tokens=seen)
    return folder


@pytest.fixture
def run_dir(written, tmp_path):
    shutil.copytree(written / "run", tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.fixture
def other(written):
    return RunDir(written / "other").checkpoints / NEWEST


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_a_folder(path):
    path.unlink()
    path.mkdir()


def make_a_broken_link(path):
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


DAMAGES = {
    "flipped by a bit": flip_a_bit,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "unreadable, a folder": make_a_folder,
    "unreadable, a broken link": make_a_broken_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(run_dir, file, damage, caplog):
    DAMAGES[damage](run_dir.checkpoints / NEWEST / file)
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    (message,) = caplog.messages
    assert message.startswith(f"checkpoint {NEWEST} is damaged (")
    assert file in message
    assert (run_dir.checkpoints / f"{NEWEST}.damaged").is_dir()


@pytest.mark.parametrize("file", FILES[1:])
def test_a_file_of_another_run_is_found_and_named(run_dir, other, file, caplog):
    if file.endswith("safetensors"):  # the weights are equal here: those of another step are not
        other = other.with_name("step_00000002")
    shutil.copy(other / file, run_dir.checkpoints / NEWEST / file)
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    assert any(name in caplog.text for name in (file, "state.json"))


def test_a_whole_checkpoint_of_another_run_is_set_aside(run_dir, other, caplog):
    shutil.rmtree(run_dir.checkpoints / NEWEST)
    shutil.copytree(other, run_dir.checkpoints / NEWEST)
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    assert "belongs to another run, fedcba9876543210" in caplog.text


def test_a_checkpoint_under_another_steps_name_is_set_aside(run_dir, caplog):
    (run_dir.checkpoints / NEWEST).rename(run_dir.checkpoints / "step_00000009")
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    assert "manifest.json is that of step 3" in caplog.text


def test_a_file_too_many_is_named_but_hidden_ones_are_left_aside(run_dir):
    newest = run_dir.checkpoints / NEWEST
    (newest / ".nfs0000000000000001").write_bytes(b"")
    assert checkpoints.damage(newest, RUN_ID) is None
    shutil.copy(newest / "state_1.safetensors", newest / "state_2.safetensors")
    assert checkpoints.damage(newest, RUN_ID) == "state_2.safetensors is not in the manifest"


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_found(run_dir):
    path = run_dir.checkpoints / NEWEST / "manifest.json"
    content, bits = path.read_bytes(), random.Random(5)
    for byte in range(len(content)):
        flipped = bytearray(content)
        flipped[byte] ^= 1 << bits.randrange(8)
        path.write_bytes(flipped)
        assert checkpoints.damage(path.parent, RUN_ID) is not None, (byte, bytes(flipped))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flipped by a bit", "removed"])
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_from_scratch(run_dir, file, damage):
    for path in checkpoints.saved(run_dir):
        DAMAGES[damage](path / file)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none is complete.*choose another\s+run\.name"):
            checkpoints.newest_complete(run_dir, RUN_ID)


def test_of_damaged_checkpoints_the_newest_is_kept_once_there_is_a_whole_one(run_dir, caplog):
    for name in ("step_00000001.damaged", "step_00000001.diverged", "step_00000001.mine", "notes.damaged"):
        (run_dir.checkpoints / name).mkdir()
    save(run_dir, 4)
    for step in (3, 4):
        flip_a_bit(run_dir.checkpoints / f"step_{step:08d}" / "state.json")
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    kept = {"step_00000002", "step_00000004.damaged", "step_00000001.diverged", "step_00000001.mine", "notes.damaged"}
    assert {path.name for path in run_dir.checkpoints.iterdir()} == {*kept, "latest"}


def test_looking_changes_nothing_in_a_whole_checkpoint(run_dir):
    before = contents(run_dir.checkpoints)
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 3
    assert contents(run_dir.checkpoints) == before


@pytest.mark.parametrize(("version", "says"), [(1, "an older version"), (3, "another version")])
def test_a_whole_checkpoint_of_another_format_is_refused_and_left_where_it_is(run_dir, version, says):
    newest = run_dir.checkpoints / NEWEST
    rewrite(newest / "state.json", version=version)
    manifest = {"files": {path.name: checkpoints.file_entry(path) for path in newest.glob("state*")}}
    rewrite(newest / "manifest.json", version=version, **manifest)
    with pytest.raises(
        CheckpointError, match=rf"of format version {version}.*reads version 2.*{says}.*another run\.name"
    ):
        checkpoints.newest_complete(run_dir, RUN_ID)
    assert newest.is_dir()


def test_a_torn_save_and_a_torn_deletion_are_cleared_away(run_dir):
    for suffix in ("tmp", "trash", "damaged.trash", "diverged.trash"):
        shutil.copytree(run_dir.checkpoints / NEWEST, run_dir.checkpoints / f"step_00000009.{suffix}")
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 3
    assert sorted(path.name for path in run_dir.checkpoints.glob("step_*")) == ["step_00000002", NEWEST]


def test_folders_that_a_person_named_alike_stay_and_decide_nothing(run_dir):
    names = ["step_mine.tmp", "step_00000080.keep.trash", "step_00000080.damaged.tmp", "step_zz.diverged"]
    for name in (*names, "step_00000009.diverged"):
        shutil.copytree(run_dir.checkpoints / NEWEST, run_dir.checkpoints / name)
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 3
    assert {*names, "step_00000009.diverged"} <= {*folders(run_dir)}


def test_a_deletion_that_leaves_files_as_those_of_another_user_is_told(run_dir, monkeypatch, caplog):
    checkpoints.delete(run_dir.checkpoints / "step_00000002")
    assert not caplog.text
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    checkpoints.delete(run_dir.checkpoints / NEWEST)
    assert f"{NEWEST}.trash: could not be deleted; if it belongs to another user" in caplog.text


def test_fragments_that_do_not_tile_their_tensors_are_damage_even_with_right_checksums(run_dir, caplog):
    newest = run_dir.checkpoints / NEWEST
    shutil.copy(newest / "state_0.safetensors", newest / "state_1.safetensors")
    entry = checkpoints.file_entry(newest / "state_1.safetensors")
    files = {path.name: checkpoints.file_entry(path) for path in newest.glob("state*")}
    rewrite(newest / "manifest.json", files={**files, "state_1.safetensors": entry})
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    assert "are there twice" in caplog.text


def test_checkpoints_of_a_divergence_are_set_aside_and_never_looked_at(run_dir, caplog):
    save(run_dir, 4)
    assert checkpoints.set_aside_from(run_dir, 3) == [NEWEST, "step_00000004"]
    assert folders(run_dir) == ["step_00000002", "step_00000004.diverged"]  # of each divergence the newest is kept
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
    save(run_dir, 3, total_target_tokens=7)
    again = contents(run_dir.checkpoints / NEWEST)
    assert checkpoints.set_aside_from(run_dir, 3) == [NEWEST]
    assert folders(run_dir) == ["step_00000002", f"{NEWEST}.diverged"]
    assert contents(run_dir.checkpoints / f"{NEWEST}.diverged") == again
    assert checkpoints.set_aside_from(run_dir, 1) == ["step_00000002"]
    write_json(run_dir.state, {"step": 3})
    assert checkpoints.newest_complete(run_dir, RUN_ID) is None
    assert "all checkpoints are of steps that diverged" in caplog.text
    assert folders(run_dir) == ["step_00000002.diverged", f"{NEWEST}.diverged"]
    save(run_dir, 1)
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 1
    assert folders(run_dir) == ["step_00000001", f"{NEWEST}.diverged"]  # there is one to resume from again


def test_returns_that_do_not_help_leave_the_oldest_checkpoint(run_dir):
    settings = {"divergence": DivergenceConfig(policy="lower_learning_rate"), "training": TrainingConfig()}
    run = SimpleNamespace(run_dir=run_dir, config=SimpleNamespace(**settings))
    for _ in range(3):
        rank._recover(run, Diverged("the loss was above 9", 5))  # type: ignore[arg-type]
    assert [event["went_on_from"] for event in read_json(run_dir.divergence)] == [3, 2, 2]
    assert folders(run_dir) == ["step_00000002", f"{NEWEST}.diverged"]


@pytest.mark.parametrize("purged", ["checkpoints", "checkpoints/*"])
def test_a_run_whose_checkpoints_were_purged_does_not_begin_again(run_dir, purged):
    write_json(run_dir.state, {"step": 0, "state": "failed"})
    for path in run_dir.path.glob(purged):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert checkpoints.newest_complete(run_dir, RUN_ID) is None  # died before its first checkpoint
    write_json(run_dir.state, {"step": 3, "state": "failed"})
    with (
        pytest.raises(
            CheckpointError, match=r"has no checkpoint, but run\.json says that step 3 was saved: were they pu"
        ),
        stuttering(errno.EIO, {"run.json"}),
    ):
        checkpoints.newest_complete(run_dir, RUN_ID)


@pytest.mark.parametrize("sign", ["metrics.jsonl says that step 3 was saved", "model/model.safetensors is there"])
def test_a_run_whose_checkpoints_and_run_json_were_purged_does_not_begin_again(tmp_path, sign):
    run_dir = RunDir(tmp_path)
    lines = MetricsLog(run_dir.metrics)
    lines.append("train", 2, {"loss": 9.0})
    assert checkpoints.newest_complete(run_dir, RUN_ID) is None  # died before its first checkpoint
    if "model" in sign:
        run_dir.model.mkdir()
        (run_dir.model / WEIGHTS).touch()
    else:
        lines.append("goodput", 3, {"steps": 1.0})
    with pytest.raises(CheckpointError, match=rf"has no checkpoint, but {sign}: were they purged"):
        checkpoints.newest_complete(run_dir, RUN_ID)


# ---------------------------------------------------------------------------------------------- a disk that stutters

STUTTERS = {
    *(
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EMFILE,
        errno.ENOMEM,
        errno.ESHUTDOWN,
        errno.ENOTCONN,
        errno.EAGAIN,
    ),
    *(errno.EREMOTEIO, errno.EHOSTDOWN, errno.ECONNRESET, errno.EACCES, errno.EPERM, errno.EINTR, errno.ENODEV),
}
"""Some of what a file system answers for a moment: a client that was evicted, a server that starts again."""


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(STUTTERS), ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "names",
    [{file} for file in FILES] + [{NEWEST}, {"checkpoints"}, {*FILES, "checkpoints"}],
    ids=lambda n: "+".join(sorted(n)),
)
def test_a_disk_that_stutters_at_a_start_sets_nothing_aside(run_dir, number, names):
    before = contents(run_dir.checkpoints)
    with stuttering(number, names):
        assert checkpoints.newest_complete(run_dir, RUN_ID).step == 3
        assert checkpoints.newest_run_id(run_dir) == RUN_ID
    assert contents(run_dir.checkpoints) == before


@pytest.mark.parametrize("number", [errno.ESHUTDOWN, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [*FILES, NEWEST, "checkpoints"])
def test_a_disk_that_does_not_answer_is_a_fault_of_the_machine_and_changes_nothing(run_dir, name, number):
    before = folders(run_dir)
    says = rf"{name}.* cannot be read now .*Start again when its disk answers"
    with stuttering(number, {name}, FOR_GOOD), pytest.raises(MachineError, match=says) as fault:
        checkpoints.newest_complete(run_dir, RUN_ID)
    assert fault.value.exit_code == 1
    assert sorted(os.listdir(run_dir.checkpoints)) == ["latest", *before]


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_disk_that_stutters_gives_a_run_no_other_id(run_dir, times):
    """With another one all its checkpoints would be taken for those of another run."""
    with stuttering(errno.ENOTCONN, {"state.json"}, times):
        try:
            assert checkpoints.newest_run_id(run_dir) == RUN_ID
        except MachineError:
            assert times > 1


def test_a_disk_that_stutters_sets_no_checkpoint_aside_that_is_saved_again(run_dir):
    before = contents(run_dir.checkpoints)
    with stuttering(errno.EAGAIN, {"manifest.json"}):
        assert all(saved.was_there for saved in save(run_dir, 3))
    assert contents(run_dir.checkpoints) == before


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_disk_that_stutters_lets_no_best_checkpoint_be_deleted(run_dir, times, monkeypatch):
    monkeypatch.setattr(retention, "PATIENCE_STEPS", 0)
    for step in range(4, 9):
        save(run_dir, step, validation={"loss": float(step)})
    before = folders(run_dir)
    settings = CheckpointConfig(every_steps=1, keep_last=2, keep_best=2)
    with stuttering(errno.EHOSTDOWN, {"state.json"}, times):
        try:
            list(retention.retain(run_dir, settings, "loss", run_dir.checkpoints / "step_00000008"))
        except MachineError:
            assert (times, folders(run_dir)) == (10**6, before)
    assert {"step_00000004", "step_00000005"} <= {*folders(run_dir)}


def test_a_disk_that_stutters_loses_no_decision_after_a_divergence(run_dir):
    settings = DivergenceConfig(policy="lower_learning_rate")
    decided = recover(run_dir, settings, "fp32", Diverged("the loss was above 9", 3), 2)
    with stuttering(errno.ECONNRESET, {"divergence.json"}):
        assert read_recovery(run_dir) == decided
    with stuttering(errno.ECONNRESET, {"divergence.json"}, FOR_GOOD), pytest.raises(MachineError):
        read_recovery(run_dir)


def test_files_that_cannot_be_opened_for_want_of_descriptors_are_not_damaged(run_dir, monkeypatch):
    """safetensors calls every file that it cannot open one that is not there."""
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0,))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = StateFiles(run_dir.checkpoints / NEWEST)  # all that is imported for it is open now
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(MachineError, match="Too many open files"):
            checkpoints.newest_complete(run_dir, RUN_ID)
        with pytest.raises(MachineError, match="Too many open files"):
            StateFiles(run_dir.checkpoints / NEWEST)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert kept.shapes == StateFiles(run_dir.checkpoints / NEWEST).shapes
    assert folders(run_dir) == ["step_00000002", NEWEST]


@pytest.fixture
def torch_cannot_open(monkeypatch):
    """Returns a function; after it, torch once cannot open a file that safetensors could."""
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))
    from_file, failures = torch.UntypedStorage.from_file, []

    def fails_once(path, *arguments, **named):
        if failures:
            raise RuntimeError(failures.pop().format(path))
        return from_file(path, *arguments, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", fails_once)
    yield lambda: failures.append("unable to open file <{}> in read-only mode: Stale file handle (116)")
    assert not failures


def test_a_file_that_torch_cannot_open_at_once_is_opened_again(run_dir, tmp_path, torch_cannot_open):
    before = contents(run_dir.checkpoints)
    torch_cannot_open()
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 3
    assert contents(run_dir.checkpoints) == before
    save_file({"weight": torch.ones(2)}, tmp_path / WEIGHTS)
    torch_cannot_open()
    with open_safetensors(tmp_path / WEIGHTS) as file:
        assert file.get_tensor("weight").tolist() == [1.0, 1.0]


def test_a_save_is_written_again_if_torch_cannot_open_what_was_written(run_dir, torch_cannot_open, monkeypatch, caplog):
    monkeypatch.setattr(async_writer, "SECONDS_BETWEEN_ATTEMPTS", 0.0)
    torch_cannot_open()  # where the bits that were written are compared
    assert {saved.problem for saved in save(run_dir, 4, save_attempts=2)} == {None}
    assert "Stale file handle (116)" in caplog.text
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 4


READERS = {
    "config.yaml": lambda run_dir: read_yaml(run_dir.config),
    "manifest.json": lambda run_dir: Manifest.load(run_dir.path),
    "model.safetensors": lambda run_dir: open_safetensors(run_dir.path / "model.safetensors").__enter__(),
    "run.json": run_log.run_id,
}


@pytest.mark.parametrize("name", READERS)
def test_what_a_start_reads_beside_checkpoints_is_waited_for_and_not_called_damaged(tmp_path, name):
    """Nobody is told to prepare again, to copy a model again, or to mend a configuration, for a moment without a disk."""
    run_dir = RunDir(tmp_path)
    (tmp_path / name).write_text('{"run_id": "0123"}', encoding="utf-8")
    with stuttering(errno.ESTALE, {name}, FOR_GOOD), pytest.raises(MachineError, match="cannot be read now"):
        READERS[name](run_dir)
    if name in ("config.yaml", "run.json"):
        with stuttering(errno.ESTALE, {name}):
            READERS[name](run_dir)
