"""A virtual environment for each toolkit, under the work folder."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from protocol import Peer

INSTALL_SECONDS = 1800


class NotInstalled(Exception):
    """The trainer cannot run here; the message says why."""


def python_of(peer: Peer, work: Path) -> Path:
    """The python that runs the trainer, after installing what is not there yet. Raises NotInstalled."""
    if not peer.packages:
        missing = [module for module in peer.modules if find_spec(module) is None]
        if missing:
            raise NotInstalled(f"{', '.join(missing)}: not in this environment")
        return Path(sys.executable)
    folder = work / "environments" / peer.name
    python, recipe = folder / "bin" / "python", json.dumps(peer.packages)
    done = folder / "installed.json"
    if not done.exists() or done.read_text(encoding="utf-8") != recipe:
        print(f"installing {peer.name} into {folder}", flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        for packages in peer.packages:
            _run([str(python), "-m", "pip", "install", "--quiet", *packages])
        done.write_text(recipe, encoding="utf-8")
    return python


def frozen(python: Path) -> list[str]:
    """Everything that is installed there, with versions."""
    done = subprocess.run([python, "-m", "pip", "freeze", "--quiet"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"took longer than {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotInstalled(errors[-1] if errors else f"pip's exit code was {done.returncode}")
