"""The copy of the code that a job runs."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer import package_data as share_folder_module
from dist_transformer.errors import MachineError
from dist_transformer.files import read_json
from dist_transformer.package_data import share_folder
from dist_transformer.run.snapshot import git_commit, take_snapshot

PACKAGE = Path(share_folder_module.__file__).resolve().parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with the shape of ours, under git."""
    top = tmp_path / "checkout"
    for name in ("dist_transformer/__init__.py", "slurm/train.sbatch", "launch/slurm_task.sh"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("first\n")
    (top / "dist_transformer" / "__pycache__").mkdir()
    _git(top, "init", "--quiet")
    _git(top, "add", ".")
    _git(top, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    return top


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout


def test_a_later_edit_does_not_change_the_snapshot(checkout: Path, tmp_path: Path) -> None:
    take_snapshot(tmp_path / "snapshot", checkout / "dist_transformer")
    (checkout / "dist_transformer" / "__init__.py").write_text("second\n")
    assert (tmp_path / "snapshot" / "dist_transformer" / "__init__.py").read_text() == "first\n"
    assert (tmp_path / "snapshot" / "launch" / "slurm_task.sh").read_text() == "first\n"
    assert not (tmp_path / "snapshot" / "dist_transformer" / "__pycache__").exists()


def test_the_commit_and_the_uncommitted_difference_are_noted(checkout: Path, tmp_path: Path) -> None:
    snapshot, commit = tmp_path / "snapshot", _git(checkout, "rev-parse", "HEAD").strip()
    take_snapshot(snapshot, checkout / "dist_transformer")
    assert read_json(snapshot / "git.json") == {"commit": commit, "changed": False, "untracked": []}
    (checkout / "slurm" / "train.sbatch").write_text("second\n")
    (checkout / "launch" / "new ü.sh").write_text("")
    take_snapshot(snapshot, checkout / "dist_transformer")
    assert read_json(snapshot / "git.json") == {"commit": commit, "changed": True, "untracked": ["launch/new ü.sh"]}
    assert "+second" in (snapshot / "git.diff").read_text()


def test_an_installed_package_in_the_checkout_of_something_else_notes_no_commit(checkout: Path, tmp_path: Path) -> None:
    package = checkout / "venv" / "dist_transformer"
    shutil.copytree(checkout / "launch", package / "share" / "launch")
    take_snapshot(tmp_path / "snapshot", package)
    assert (tmp_path / "snapshot" / "dist_transformer" / "share" / "launch" / "slurm_task.sh").is_file()
    assert sorted(path.name for path in (tmp_path / "snapshot").iterdir()) == ["dist_transformer"]


def test_the_commit_is_told_of_a_checkout_and_of_its_snapshot_alike(checkout: Path, tmp_path: Path) -> None:
    package, snapshot = checkout / "dist_transformer", tmp_path / "snapshot"
    commit = _git(checkout, "rev-parse", "HEAD").strip()
    take_snapshot(snapshot, package)
    assert git_commit(package) == git_commit(snapshot / "dist_transformer") == commit
    (package / "__init__.py").write_text("second\n")
    take_snapshot(snapshot, package)
    assert git_commit(package) == git_commit(snapshot / "dist_transformer") == f"{commit}+"


def test_an_installed_package_is_of_no_commit(checkout: Path, tmp_path: Path) -> None:
    assert git_commit(checkout / "venv" / "dist_transformer") is None
    assert git_commit(tmp_path / "dist_transformer") is None


def test_a_new_snapshot_replaces_the_old_one_whole(checkout: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    (snapshot / "left_over").mkdir(parents=True)
    (tmp_path / "snapshot.tmp" / "torn").mkdir(parents=True)
    take_snapshot(snapshot, checkout / "dist_transformer")
    assert not (snapshot / "left_over").exists()
    assert not (tmp_path / "snapshot.tmp").exists()


def test_the_snapshot_of_a_package_that_is_installed_read_only_can_be_replaced(checkout: Path, tmp_path: Path) -> None:
    package = checkout / "dist_transformer"
    (package / "cli").mkdir()
    (package / "cli" / "main.py").touch()
    closed = [package / "cli" / "main.py", package / "cli", package]
    for path in closed:
        path.chmod(0o444 if path.is_file() else 0o555)
    take_snapshot(tmp_path / "snapshot", package)
    for path in reversed(closed):
        path.chmod(0o755)
    folders = [tmp_path / "snapshot", *(path for path in (tmp_path / "snapshot").rglob("*") if path.is_dir())]
    assert len(folders) == 5
    assert {path.stat().st_mode & 0o700 for path in folders} == {0o700}, "else nothing in them can be removed"
    assert (tmp_path / "snapshot" / "dist_transformer" / "cli" / "main.py").stat().st_mode & 0o777 == 0o444


def test_a_full_disk_is_told_with_the_folder_and_leaves_the_old_snapshot(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    take_snapshot(snapshot, checkout / "dist_transformer")

    def full(_: str, target: str, **__: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(shutil, "copyfile", full)
    told = (
        rf"^{snapshot}: cannot be written \(\[Errno 28\] No space left on device: '{snapshot}.tmp/[^']*'\): make room"
    )
    with pytest.raises(MachineError, match=told):
        take_snapshot(snapshot, checkout / "dist_transformer")
    assert (snapshot / "dist_transformer").is_dir()
    assert not (tmp_path / "snapshot.tmp").exists()


def test_a_snapshot_of_this_program_runs_by_itself_and_finds_its_own_launch_scripts(tmp_path: Path) -> None:
    take_snapshot(tmp_path / "snapshot")
    command = [sys.executable, "-m", "dist_transformer.package_data", "launch"]
    environment = {"PYTHONPATH": str(tmp_path / "snapshot"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    launch = Path(done.stdout.strip())
    assert launch.is_relative_to(tmp_path / "snapshot")
    assert (launch / "slurm_task.sh").stat().st_mode & 0o100


def test_the_share_folder_inside_the_package_goes_before_a_stranger_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "dist_transformer"
    (package / "share" / "launch").mkdir(parents=True)
    (package.parent / "launch").mkdir()
    monkeypatch.setattr(share_folder_module, "__file__", str(package / "package_data.py"))
    assert share_folder("launch") == package / "share" / "launch"
    with pytest.raises(FileNotFoundError, match=r"no slurm folder in .*; reinstall dist-transformer"):
        share_folder("slurm")
