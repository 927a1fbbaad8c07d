"""A kill at any moment of a save or a deletion, and a disk that is full."""

import os
import shutil
import subprocess

import pytest
from checkpoint_helpers import RUN_ID, contents, folders, save

from dist_transformer import files
from dist_transformer.config.schema import CheckpointConfig
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import async_writer, checkpoints, retention


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


class Snapshots:
    """The checkpoint folder as a kill would leave it, before and after each call that changes the disk."""

    def __init__(self, run_dir, folder, monkeypatch):
        self._run_dir, self._folder, self.taken = run_dir, folder, []
        for module, name in (
            (os, "replace"), (os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (async_writer, "write_state_file"),
            (async_writer, "write_json"), (async_writer, "write_text"), (files, "flush_to_disk"),
            (async_writer, "flush_to_disk"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self._around(getattr(module, name)))

    def _around(self, function):
        def wrapped(*arguments, **options):
            self.take()
            result = function(*arguments, **options)
            self.take()
            return result

        return wrapped

    def take(self):
        target, now = self._folder / str(len(self.taken)), contents(self._run_dir.checkpoints)
        if not self.taken or self.taken[-1][1] != now:
            self.taken.append((RunDir(target), now))

    def found(self, run_id=RUN_ID):
        """The step of the newest whole checkpoint in each of them."""
        for run_dir, now in self.taken:
            for name, content in now.items():
                path = run_dir.checkpoints / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return [checkpoints.newest_complete(run_dir, run_id).step for run_dir, _ in self.taken]


def test_a_kill_at_any_moment_of_a_save_leaves_the_old_or_the_new_checkpoint(run_dir, tmp_path, monkeypatch, caplog):
    save(run_dir, 4, num_ranks=1)
    with monkeypatch.context() as patch:
        moments = Snapshots(run_dir, tmp_path / "moments", patch)
        save(run_dir, 5, num_ranks=1)
    found = moments.found()
    assert found == sorted(found)
    assert set(found) == {4, 5}
    names = [{name for name in now if name.startswith("step_00000005")} for _, now in moments.taken]
    for file in ("state_0.safetensors", "state.json", "manifest.json"):
        assert any(f"step_00000005.tmp/{file}" in stage for stage in names)
    latest = [now["latest"] for _, now in moments.taken]
    assert any(step == 5 and b"4" in text for step, text in zip(found, latest, strict=True))  # before `latest`
    assert "damaged" not in caplog.text


def test_a_kill_at_any_moment_of_a_deletion_leaves_whole_checkpoints(run_dir, tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        save(run_dir, step, num_ranks=1)
    with monkeypatch.context() as patch:
        moments = Snapshots(run_dir, tmp_path / "moments", patch)
        settings, newest = CheckpointConfig(every_steps=1, keep_last=1), run_dir.checkpoints / "step_00000003"
        list(retention.retain(run_dir, settings, "loss", newest))
        assert checkpoints.set_aside_from(run_dir, 3)
    moments.taken.pop()  # here nothing is left but what diverged
    assert set(moments.found()) == {3}
    assert len(moments.taken) > 5
    for moment, _ in moments.taken:
        assert [checkpoints.damage(path) for path in checkpoints.saved(moment)].count(None) == len(folders(moment))
    assert "damaged" not in caplog.text


@pytest.fixture
def small_disk(run_dir, monkeypatch):
    """A disk of 3 MB under the checkpoints."""
    monkeypatch.setattr(async_writer, "SECONDS_BETWEEN_ATTEMPTS", 0.0)
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    run_dir.checkpoints.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", run_dir.checkpoints], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr}")
    yield run_dir.checkpoints
    subprocess.run(["umount", run_dir.checkpoints], check=True)


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_full_disk_gives_up_the_save_and_keeps_the_older_one(small_disk, run_dir, monkeypatch, looks_first):
    if not looks_first:  # a quota, or another job that fills the disk in between
        monkeypatch.setattr(
            async_writer, "_prepare", lambda temporary, needed, look=async_writer._prepare: look(temporary, 0)
        )
        monkeypatch.setattr(async_writer, "MARGIN_BYTES", 0)
    save(run_dir, 1)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    (problem,) = {saved.problem for saved in save(run_dir, 2, save_attempts=2)}
    assert ("are free on" if looks_first else "No space left on device") in problem
    assert "resume from step_00000001" in problem
    assert folders(run_dir) == ["step_00000001"]
    (small_disk / "filler").unlink()
    assert save(run_dir, 2)[0].path is not None
    assert checkpoints.newest_complete(run_dir, RUN_ID).step == 2
