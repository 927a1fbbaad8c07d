"""Checkpoints, each complete or absent, the same for every ZeRO stage, precision and number of ranks.

    checkpoints/step_00012000/state_0.safetensors ... state_{W-1}.safetensors   weights and at most two moments by name, fp32
                              state.json                                         step, position, loss scaler, recipe, shapes
                              manifest.json                                      step, run, every file, size, SHA-256
    checkpoints/step_00011000.damaged                                            set aside by a start: files have changed
    checkpoints/step_00013000.diverged                                           set aside after a divergence
                                                                                 (of each kind the newest is kept)
    checkpoints/latest                                                           the newest one's name

docs/architecture.md ("Checkpoints") says how they are saved and loaded: a folder without a suffix is complete.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.errors import CheckpointError, MachineError
from dist_transformer.files import file_sha256, is_file, patiently, read_json_patiently, refresh
from dist_transformer.interop.model_folder import WEIGHTS
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records
from dist_transformer.run.records import read_record_patiently
from dist_transformer.training.checkpoint.tensor_files import MANIFEST, STATE, VERSION, StateFiles, read_state

if TYPE_CHECKING:  # at run time it would import DeepSpeed for every command that only reads checkpoints
    from torch import Tensor

    from dist_transformer.training.engine.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Number of updates before the checkpoint."""
        return int(self.state["step"])


def folder_name(step: int) -> str:
    """Returns the folder name of the checkpoint of a step; names sort like steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder. Raises ValueError: the folder has another name, or one
    with a suffix."""
    return int(path.name.removeprefix("step_"))


def saved(run_dir: RunDir) -> list[Path]:
    """Returns the checkpoint folders with a manifest, oldest first; their content is not checked for damage. Raises
    MachineError: the disk does not answer; also raised by the other functions here that read checkpoints."""
    return [path for path in _named(run_dir) if is_file(path / MANIFEST)]


def newest_complete(run_dir: RunDir, run_id: str | None) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint of this run, or None if there is none at all. Renames others `.damaged`.

    Rank 0 only, with the run folder's lock held: it also deletes the files of a killed save. Raises CheckpointError:
    there are checkpoints, but none is complete, or there were some: a run never silently starts again from scratch. Or
    the newest complete one is of another version of the format.
    """
    refresh(run_dir.checkpoints)  # another machine may have saved since this one looked last
    for left_over in _with_suffix(run_dir, r"(tmp|((damaged|diverged)\.)?trash)"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a save or a deletion that was killed
    candidates = _named(run_dir)
    damaged: list[Path] = []
    for path in reversed(candidates):
        if (problem := damage(path, run_id)) is not None:
            refresh(path)  # it is set aside for what it is now, not for what this machine remembers of it
            problem = damage(path, run_id)
        if problem is None:
            state = read_state(path)
            _delete_aside_but(damaged[:1])
            _delete_aside_but(_with_suffix(run_dir, "diverged")[-1:])  # all stay while there is none to resume from
            return Checkpoint(path, state)
        damaged.append(aside := set_aside(path, "damaged"))
        log.warning("checkpoint %s is damaged (%s): set aside as %s", path.name, problem, aside.name)
    diverged = [path.name for path in _with_suffix(run_dir, "diverged")]
    if candidates or (not diverged and _with_suffix(run_dir, "damaged")):
        raise CheckpointError(
            f"{run_dir.checkpoints}: has checkpoints, but none is complete. To train again from scratch, choose another "
            "run.name or move this folder away."
        )
    notes = [(run_dir.metrics.name, record) for record in read_records(run_dir.metrics, "goodput")]
    notes += [(run_dir.state.name, read_record_patiently(run_dir.state))]  # both written after a checkpoint
    signs = [f"{run_dir.model.name}/{WEIGHTS} is there"] if is_file(run_dir.model / WEIGHTS) else []
    signs += [f"{name} says that step {step} was saved" for name, note in notes if (step := note.get("step", 0)) > 0]
    if signs and not diverged:
        raise CheckpointError(
            f"{run_dir.checkpoints}: has no checkpoint, but {signs[-1]}: were they purged? Restore them; to train again from "
            "scratch, choose another run.name or move this folder away."
        )
    if diverged:
        log.warning("%s: all checkpoints are of steps that diverged (%s)", run_dir.checkpoints, ", ".join(diverged))
    return None


def newest_run_id(run_dir: RunDir) -> str | None:
    """Returns the run id of the newest checkpoint with a readable state; None if there is none."""
    for path in reversed(saved(run_dir)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(read_json_patiently(path / STATE)["run_id"])
    return None


def set_aside_from(run_dir: RunDir, step: int) -> list[str]:
    """Renames the checkpoints of `step` and later to `.diverged`; returns their names (rank 0, after a divergence).

    If good checkpoints remain, only the newest renamed one is kept, and none of earlier divergences.
    """
    later = [path for path in _named(run_dir) if step_of(path) >= step]
    # Newest first: after a kill in between, those nearest to the good ones are still to be renamed.
    aside = [set_aside(path, "diverged") for path in reversed(later)]
    if saved(run_dir):
        _delete_aside_but(aside[:1])
    return [path.name for path in later]


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint so that no start finds it; an older one of that name is deleted."""
    aside = path.with_name(f"{path.name}.{why}")
    delete(aside)
    path.rename(aside)
    return aside


def _delete_aside_but(newest: list[Path]) -> None:
    """Deletes checkpoints set aside earlier, or now, for the same reason as `newest`; nothing if `newest` is empty."""
    for kept in newest:
        for path in kept.parent.iterdir():
            if path != kept and re.fullmatch(rf"step_\d{{8,}}\{kept.suffix}", path.name):
                delete(path)


def damage(path: Path, run_id: str | None = None) -> str | None:
    """Returns the damage of a checkpoint folder ("state_0.safetensors: SHA-256 differs ...") or None; reads every byte.

    `run_id`: the run that it must belong to; None: any. Raises MachineError: it cannot be read now: this is no damage,
    and no reason to set it aside.
    """
    if not is_file(path / MANIFEST):
        return f"{MANIFEST} is missing, or no file that can be read"
    try:
        manifest = read_json_patiently(path / MANIFEST)
        files, step, run = manifest["files"], manifest["step"], manifest.get("run_id")
        if problem := _wrong_names(path, set(files)) or _wrong_bytes(path, files):
            return problem
        state = read_json_patiently(path / STATE)
        # The state has a checksum; the manifest has none, only values that are also in the state.
        if (manifest["version"], step, run) != (state["version"], state["step"], state.get("run_id")):
            return f"{MANIFEST} and {STATE} differ in version, step or run"
        if re.fullmatch(r"step_\d{8,}", path.name) and step != step_of(path):  # a copy may have another name
            return f"{MANIFEST} is that of step {step}"
        if state["version"] != VERSION:
            return None  # complete, whatever its content: `check_version` decides
        if run_id is not None and run != run_id:
            return f"{MANIFEST}: belongs to another run, {run}; this one is {run_id}"
        StateFiles(path)
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {type(error).__name__}: {error}"
    return None


def verified(run_dir: RunDir) -> Iterator[tuple[Path, str | None]]:
    """Yields each checkpoint's folder, oldest first, with its damage or None; reads every byte."""
    for path in _named(run_dir):
        yield path, damage(path)


def load(checkpoint: Checkpoint, engine: "Engine", progress: Callable[[], None] = lambda: None) -> None:
    """Loads weights and optimizer state into the engine (collective); any stage, precision and number of ranks.
    `progress` is called for each tensor.

    Raises:
        CheckpointError: the parameters have other names or shapes than the model's.
        MachineError: on every rank: what is now in memory is not what was saved.
    """
    files = StateFiles(checkpoint.path)
    expected = {name: tuple(shape) for name, shape in engine.shapes().items()}
    if different := sorted(name for name, _ in expected.items() ^ files.shapes.items()):
        name = different[0]
        raise CheckpointError(
            f"{checkpoint.path}: is a checkpoint of another model: {name} has shape {files.shapes.get(name)} there, "
            f"{expected.get(name)} in this run (None: it is not there); {len(set(different))} tensors differ"
        )

    def read(part: str, name: str, start: int, stop: int) -> "Tensor | None":
        progress()
        return files.read(part, name, start, stop)

    engine.load(read, checkpoint.step)
    saved_sums, sums = checkpoint.state.get("bit_sums", {}), engine.bit_sums()
    if not files.has_part("ema", of_all=True):
        sums.pop("ema", None)  # of parameters that were frozen it now begins with their weights
    # 0: of a part that one of them has not.
    if different := [part for part, now in sums.items() if now and saved_sums.get(part) and now != saved_sums[part]]:
        raise MachineError(
            f"{checkpoint.path}: was loaded with other bits than were saved ({', '.join(different)}), although its files are "
            "undamaged: the memory of a rank may be at fault. Start again; if it fails again, on other nodes"
        ).agreed()
    engine.set_scaler_state(checkpoint.state.get("scaler", {}))


def file_entry(path: Path) -> dict[str, Any]:
    """Returns the manifest's entry for a file: size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _named(run_dir: RunDir) -> list[Path]:
    """Returns all entries with the name of a checkpoint, oldest first."""
    return sorted(_entries(run_dir, r"step_\d{8,}"), key=step_of)


def _with_suffix(run_dir: RunDir, suffix: str) -> list[Path]:
    return sorted(_entries(run_dir, rf"step_\d{{8,}}\.{suffix}"))  # names of our own: others are a person's


def _entries(run_dir: RunDir, pattern: str) -> list[Path]:
    """Lists entries by `iterdir`: `glob` finds nothing on a disk that does not answer, and the run would start anew."""
    folder = run_dir.checkpoints
    with suppress(OSError):  # no checkpoint yet
        return [path for path in patiently(folder, lambda: [*folder.iterdir()]) if re.fullmatch(pattern, path.name)]
    return []


def _wrong_names(path: Path, expected: set[str]) -> str | None:
    """Finds a missing or surplus file. Ignores hidden ones, which network filesystems and file browsers make."""
    names = {entry.name for entry in patiently(path, lambda: [*path.iterdir()]) if not entry.name.startswith(".")}
    if STATE not in expected:
        return f"{MANIFEST} does not name {STATE}"
    if missing := sorted(expected - names):
        return f"{missing[0]} is missing"
    if surplus := sorted(names - expected - {MANIFEST}):
        return f"{surplus[0]} is not in the manifest"
    return None


def _wrong_bytes(path: Path, files: dict[str, Any]) -> str | None:
    """Finds the first file that differs from the manifest. Threads hash in parallel, as hashing releases the GIL."""
    with ThreadPoolExecutor(max_workers=min(len(files), os.cpu_count() or 1)) as pool:
        problems = list(pool.map(lambda name: _wrong_file(path / name, files[name]), sorted(files)))
    return next((problem for problem in problems if problem), None)


def _wrong_file(path: Path, entry: dict[str, Any]) -> str | None:
    if not is_file(path):  # a folder, a broken link; a pipe would block
        return f"{path.name} is no file that can be read"
    try:
        if (size := patiently(path, path.stat).st_size) != entry["bytes"]:
            return f"{path.name} has {size} bytes, the manifest says {entry['bytes']}"
        if patiently(path, lambda: file_sha256(path)) != entry["sha256"]:
            return f"{path.name}: SHA-256 differs from the manifest's"
    except OSError as error:
        return f"{path.name}: {error}"
    return None


def delete(path: Path) -> None:
    """Deletes a checkpoint in two steps, so that a kill in between leaves no incomplete folder under its name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    trash = path.with_name(path.name + ".trash")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
    if trash.exists():
        log.warning("%s: could not be deleted; if it belongs to another user, only that one can make the room", trash)
