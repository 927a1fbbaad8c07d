"""Checkpoints: the same state for every stage, whole or not there, never a damaged one loaded."""

import json
import shutil

import pytest
import torch

from dist_transformer.errors import CheckpointError
from dist_transformer.run_dir import RunDir
from dist_transformer.training import checkpoints


def a_step(engine, batch, learning_rate=1e-2):
    loss, _ = engine(*batch)
    engine.backward(loss, 20)
    engine.step(learning_rate)
    return float(loss.detach())


def save(run_dir, engine, ranks, step):
    return checkpoints.save(run_dir, engine, {"step": step, "scaler": engine.scaler_state()}, ranks, lambda: None)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


@pytest.fixture
def three(run_dir, make_engine, ranks, batches):
    """Checkpoints of steps 1, 2 and 3."""
    engine = make_engine()
    for step in (1, 2, 3):
        a_step(engine, batches[step])
        save(run_dir, engine, ranks, step)
    return run_dir


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(0, 1), (1, 0), (1, 1), (1, 3), (2, 3), (3, 2), (3, 0), (3, 3)])
def test_a_checkpoint_of_any_stage_goes_on_in_any_other(run_dir, make_engine, ranks, batches, saved_by, loaded_by):
    engine = make_engine(zero_stage=saved_by)
    for batch in batches[:3]:
        a_step(engine, batch)
    save(run_dir, engine, ranks, 3)
    expected = [a_step(engine, batch) for batch in batches[3:6]]
    other = make_engine(zero_stage=loaded_by, seed=99)
    checkpoints.load(checkpoints.newest_whole(run_dir), other)
    assert [a_step(other, batch) for batch in batches[3:6]] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_moments_and_loss_scale_survive_in_short_precisions(run_dir, make_engine, ranks, batches, precision):
    engine = make_engine(precision=precision, initial_loss_scale=256, loss_scale_window=2)
    for batch in batches[:3]:
        a_step(engine, batch)
    save(run_dir, engine, ranks, 3)
    expected = [a_step(engine, batch) for batch in batches[3:6]]
    other = make_engine(precision=precision, initial_loss_scale=4, loss_scale_window=2, seed=99)
    checkpoints.load(checkpoints.newest_whole(run_dir), other)
    assert [a_step(other, batch) for batch in batches[3:6]] == expected
    assert other.loss_scale() == engine.loss_scale()


def test_the_newest_whole_one_is_taken_and_latest_names_it(three):
    assert checkpoints.newest_whole(three).step == 3
    assert (three.checkpoints / "latest").read_text(encoding="utf-8") == "step_00000003\n"


def test_only_the_last_ones_are_kept(three):
    checkpoints.keep_last(three, 2, 1)
    assert [p.name for p in checkpoints.saved(three)] == ["step_00000002", "step_00000003"]
    assert not list(three.checkpoints.glob("*.trash"))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped bit": flip_a_bit,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize(
    ("file", "damage"),
    [(f, d) for f in ("state_0.safetensors", "state.json") for d in DAMAGES]
    + [("manifest.json", d) for d in ("cut short", "removed", "emptied")],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(three, file, damage, caplog):
    newest = three.checkpoints / "step_00000003"
    DAMAGES[damage](newest / file)
    assert checkpoints.newest_whole(three).step == 2
    # Without a manifest it is a save that never ended, which says nothing; otherwise the log names it.
    assert (damage == "removed" and file == "manifest.json") or "step_00000003 is damaged" in caplog.text


def test_a_wrong_checksum_in_the_manifest_is_damage(three):
    path = three.checkpoints / "step_00000003" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["files"]["state.json"]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert checkpoints.newest_whole(three).step == 2


def test_files_of_another_checkpoint_are_damage(three):
    shutil.copy(
        three.checkpoints / "step_00000001" / "state_0.safetensors",
        three.checkpoints / "step_00000003" / "state_0.safetensors",
    )
    assert checkpoints.newest_whole(three).step == 2


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_from_scratch(three):
    for path in checkpoints.saved(three):
        flip_a_bit(path / "state_0.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none is whole.*choose another\s+run\.name"):
            checkpoints.newest_whole(three)


def test_a_torn_save_is_never_seen(three):
    torn = three.checkpoints / "step_00000009.tmp"
    shutil.copytree(three.checkpoints / "step_00000003", torn)
    assert checkpoints.newest_whole(three).step == 3


def test_a_checkpoint_of_another_model_names_what_is_missing(three, make_engine, monkeypatch):
    engine = make_engine()
    checkpoint = checkpoints.newest_whole(three)
    name, parameter = next(engine.parameters())
    monkeypatch.setattr(type(engine), "parameters", lambda self: iter([(f"other.{name}", parameter)]))
    with pytest.raises(CheckpointError, match=rf"has no weight/other\.{name}.*another model"):
        checkpoints.load(checkpoint, engine)


def test_a_save_that_cannot_write_leaves_the_older_ones(three, make_engine, ranks, monkeypatch):
    def full(tensors, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(
        CheckpointError, match=r"step_00000004 could not be written.*No space left.*go on from step_00000003"
    ):
        save(three, make_engine(), ranks, 4)
    assert not (three.checkpoints / "step_00000004.tmp").exists()
    assert checkpoints.newest_whole(three).step == 3


def test_weights_alone_are_read_by_parameter_name(three, make_engine, batches):
    engine = make_engine()
    for step in (1, 2, 3):
        a_step(engine, batches[step])
    weights = checkpoints.Weights(three.checkpoints / "step_00000003")
    assert weights.keys() == {name for name, _ in engine.parameters()}
    for name, parameter in engine.parameters():
        assert torch.equal(weights[name], engine.read(parameter).weight)
