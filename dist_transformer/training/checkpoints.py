"""Checkpoints that are whole or not there, the same for every ZeRO stage, precision and number of ranks (promise P5).

    checkpoints/step_00012000/state_0.safetensors ... state_{W-1}.safetensors   weights and Adam moments by name, fp32
                              state.json                                         step, position, loss scaler, recipe
                              manifest.json                                      every file, size, SHA-256: written last
    checkpoints/latest                                                           the newest one's name

A save writes into `step_N.tmp`, flushes it on every rank, then the manifest, then renames: a folder without `.tmp` is
whole. At load every file is read against the manifest; a damaged checkpoint is set aside and the newest whole one taken.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dist_transformer.distributed import Ranks
from dist_transformer.errors import CheckpointError
from dist_transformer.run_dir import RunDir, flush_to_disk, read_json, write_json, write_text
from dist_transformer.training.engine import Engine, ParameterState

log = logging.getLogger(__name__)

PARTS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def saved(run_dir: RunDir) -> list[Path]:
    """Checkpoint folders that carry a manifest, oldest first; whether they are undamaged is not checked."""
    return sorted(p for p in run_dir.checkpoints.glob("step_????????") if (p / "manifest.json").is_file())


def save(
    run_dir: RunDir, engine: Engine, state: dict[str, Any], ranks: Ranks, progress: Callable[[], None]
) -> Path | None:
    """Writes a checkpoint of `state["step"]` (collective); None where one is there already, which is left as it is.

    `progress` is called after each parameter and file.

    Raises:
        CheckpointError: a rank could not write; nothing that was there before is touched. Raised on every rank.
    """
    final = run_dir.checkpoints / folder_name(state["step"])
    if ranks.from_first((final / "manifest.json").is_file()):
        return None
    temporary = final.with_name(final.name + ".tmp")
    problem = _make_empty(temporary) if ranks.is_first else None
    entry = None
    if (problem := ranks.from_first(problem)) is None:
        tensors = _own_tensors(engine, ranks, progress)
        entry, problem = _write_tensors(temporary / f"state_{ranks.rank}.safetensors", tensors)
    progress()
    results = ranks.gather((entry, problem))
    problems = [p for _, p in results if p]
    if not problems:
        problem = _commit(temporary, final, state, [e for e, _ in results]) if ranks.is_first else None
        problems = [p for p in [ranks.from_first(problem)] if p]
    if problems:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        whole = ranks.from_first([p.name for p in saved(run_dir)][-1:])
        kept = f"the run can go on from {whole[0]}" if whole else "there is no earlier checkpoint"
        raise CheckpointError(
            f"checkpoint {final.name} could not be written: {problems[0]}; {kept}. Free space or mend the filesystem of "
            f"{run_dir.checkpoints}, then start the same command again."
        )
    return final


def regular(run_dir: RunDir, every_steps: int) -> list[Path]:
    """The newest checkpoint and those of every `every_steps` steps, oldest first: what a run without stops has too."""
    paths = [path for path in saved(run_dir) if step_of(path) > 0]
    return [path for path in paths if step_of(path) % every_steps == 0 or path == paths[-1]]


def keep_last(run_dir: RunDir, count: int, every_steps: int) -> None:
    """Keeps the newest `count` regular checkpoints, deletes the others and those of stops (rank 0, after a commit)."""
    kept = regular(run_dir, every_steps)[-count:]
    for old in (path for path in saved(run_dir)[:-1] if path not in kept):
        trash = old.with_name(old.name + ".trash")
        old.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def newest_whole(run_dir: RunDir) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None where there are none at all. Damaged ones are renamed `.damaged`.

    Rank 0 only, with the run folder's lock held: it also clears what a killed save left behind.

    Raises:
        CheckpointError: there are checkpoints, but none is whole: a run never silently starts again from scratch.
    """
    for left_over in [*run_dir.checkpoints.glob("step_*.tmp"), *run_dir.checkpoints.glob("step_*.trash")]:
        shutil.rmtree(left_over, ignore_errors=True)  # of a save or a deletion that was killed
    candidates = saved(run_dir)
    for path in reversed(candidates):
        problem = damage(path)
        if problem is None:
            return Checkpoint(path, read_json(path / "state.json"))
        aside = path.with_name(path.name + ".damaged")
        log.warning("checkpoint %s is damaged (%s): set aside as %s", path.name, problem, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    if candidates or list(run_dir.checkpoints.glob("step_*.damaged")):
        raise CheckpointError(
            f"{run_dir.checkpoints}: has checkpoints, but none is whole. To train again from scratch, choose another "
            "run.name or move this folder away."
        )
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder ("state_0.safetensors: SHA-256 differs ..."), or None: reads every byte."""
    try:
        entries = read_json(path / "manifest.json")["files"]
        for name, entry in entries.items():
            if (path / name).stat().st_size != entry["bytes"]:
                return f"{name} has {(path / name).stat().st_size} bytes, the manifest says {entry['bytes']}"
            if _sha256(path / name) != entry["sha256"]:
                return f"{name}: SHA-256 differs from the manifest's"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(checkpoint: Checkpoint, engine: Engine) -> None:
    """Puts weights and optimizer state into the engine (collective); any stage, precision and number of ranks.

    Raises:
        CheckpointError: the parameters have other names than the model's.
    """
    engine.prepare_write(checkpoint.step)
    tensors = _TensorFiles(checkpoint.path)
    for name, parameter in engine.parameters():
        state = ParameterState(*(tensors.read(f"{part}/{name}") for part in PARTS))
        engine.write(parameter, state)
    engine.set_scaler_state(checkpoint.state.get("scaler", {}))


class Weights(Mapping[str, Any]):
    """The fp32 weights of a checkpoint by parameter name, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._tensors = _TensorFiles(path)
        self._names = [key.removeprefix("weight/") for key in self._tensors.names() if key.startswith("weight/")]

    def __getitem__(self, name: str) -> Any:
        return self._tensors.read(f"weight/{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _TensorFiles:
    """The tensors of a checkpoint folder, found over all of its files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            files: list[Any] = [safe_open(f, framework="pt") for f in sorted(self._path.glob("state_*.safetensors"))]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from error
        self._place: dict[str, Any] = {key: file for file in files for key in file.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        return sorted(self._place)

    def read(self, key: str) -> Any:
        if key not in self._place:
            raise CheckpointError(f"{self._path}: has no {key}: it is a checkpoint of another model")
        return self._place[key].get_tensor(key)


def _own_tensors(engine: Engine, ranks: Ranks, progress: Callable[[], None]) -> dict[str, Any]:
    """Every rank reads every parameter (collective) and keeps each W-th."""
    own = {}
    for index, (name, parameter) in enumerate(engine.parameters()):
        state = engine.read(parameter)
        progress()
        if index % ranks.num_ranks == ranks.rank:
            own.update({f"{part}/{name}": getattr(state, part).contiguous() for part in PARTS})
    return own


def _make_empty(folder: Path) -> str | None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return None


def _write_tensors(path: Path, tensors: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]] | None, str | None]:
    try:
        save_file(tensors, path)
        flush_to_disk(path)
        return (path.name, _entry(path)), None
    except (OSError, SafetensorError) as error:
        return None, f"{path.name}: {error}"


def _commit(temporary: Path, final: Path, state: dict[str, Any], entries: list[Any]) -> str | None:
    try:
        write_json(temporary / "state.json", state)
        files = dict([*entries, ("state.json", _entry(temporary / "state.json"))])
        write_json(temporary / "manifest.json", {"version": 1, "step": state["step"], "files": files})
        shutil.rmtree(final, ignore_errors=True)  # without a manifest, or save() would have returned
        temporary.rename(final)
        flush_to_disk(final.parent)
    except OSError as error:
        return str(error)
    try:
        write_text(final.parent / "latest", final.name + "\n")  # for people and scripts; we look for ourselves
    except OSError as error:
        log.warning("%s could not be named in `latest`: %s", final.name, error)
    return None


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
