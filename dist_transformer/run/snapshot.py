"""A copy of the code in the run folder, which the job runs: later edits do not change a waiting or requeued job."""

import json
import shutil
import subprocess
from pathlib import Path

from dist_transformer.errors import MachineError

_PACKAGE = Path(__file__).resolve().parent.parent


def take_snapshot(folder: Path, package: Path = _PACKAGE) -> None:
    """Replaces `folder` by a copy of the package, its batch and launch scripts, and their state in git.

    `folder` then works as an entry of PYTHONPATH. An unfinished copy never has this name. Raises MachineError: the disk
    is full, or fails.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    # An installed package carries them inside itself.
    beside = () if (package / "share").is_dir() else ("slurm", "launch")
    try:
        for source in (package, *(package.parent / name for name in beside)):
            shutil.copytree(source, temporary / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        for copied in temporary.rglob("*/"):
            copied.chmod(copied.stat().st_mode | 0o700)  # of a package that is installed read-only
        for name, text in _git_state(package.parent).items():
            (temporary / name).touch(0o600)  # uncommitted changes may be private
            (temporary / name).write_text(text, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        why = error.args[0][0][-1] if isinstance(error, shutil.Error) else error  # the first of its (from, to, why)
        raise MachineError(f"{folder}: cannot be written ({why}): make room or wait for the disk; resubmit") from error


def git_commit(package: Path = _PACKAGE) -> str | None:
    """Returns the commit of this code, from its snapshot or checkout; followed by "+" if the code differs from it."""
    kept = package.parent / "git.json"
    text = kept.read_text(encoding="utf-8") if kept.is_file() else _git_state(package.parent).get("git.json", "{}")
    state = json.loads(text)
    return f"{state['commit']}{'+' if state['changed'] else ''}" if state.get("commit") else None


def _git_state(checkout: Path) -> dict[str, str]:
    """Returns the commit, the difference of the working tree to it, and untracked files; empty outside our checkout."""
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()) != checkout:
        return {}
    commit = (_git(checkout, "rev-parse", "HEAD") or "").strip()
    difference = _git(checkout, "diff", "HEAD") or ""
    untracked = (_git(checkout, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")[:-1]
    state = {"commit": commit, "changed": bool(difference), "untracked": untracked}
    return {"git.json": json.dumps(state, indent=1) + "\n", "git.diff": difference}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
