"""The tensors of a checkpoint: fragments of flattened fp32 tensors, one safetensors file for each rank that wrote.

    state.json            "version": 2, "state_files": 2, "shapes": {"encoder_norm.weight": [512], ...}
    state_0.safetensors   "weight/encoder_norm.weight": 256 numbers; metadata {"starts": {"weight/encoder_norm.weight": 0}}
    state_1.safetensors   "weight/encoder_norm.weight": 256 numbers; metadata {"starts": {"weight/encoder_norm.weight": 256}}

Parts are "weight", Adam's "exp_avg" and "exp_avg_sq", and "ema". The fragments of a tensor tile it exactly, so with any
later number of ranks each rank reads only the elements that it owns.
"""

import errno
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from dist_transformer.data.manifest import Count
from dist_transformer.errors import CheckpointError
from dist_transformer.files import patiently, read_json, read_json_patiently, write_json
from dist_transformer.interop.model_folder import safetensors_file, write_safetensors
from dist_transformer.training.engine.bit_sums import bit_sum

MANIFEST, STATE = "manifest.json", "state.json"
"""Files beside the tensors: size and checksum of every file, and the other state of the run (checkpoints.py)."""
LATER = ".validation.json"
"""File with the measures of a validation that a later start made, and its settings. Hidden: it is not part of the committed
checkpoint."""
VERSION = 2
"""Version of the format. Version 1 held whole tensors."""


def file_name(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"state_{rank}.safetensors"


def write_state_file(path: Path, fragments: Mapping[str, Tensor], starts: Mapping[str, int]) -> None:
    """Writes one rank's fragments by "part/name", and their starts in the flattened tensors. Raises OSError."""
    write_safetensors(dict(fragments), path, {"starts": json.dumps(starts, sort_keys=True)})


def file_bit_sum(path: Path) -> int:
    """Returns the bit sum of all fragments in one rank's file, not mapped: there an error of the disk would be SIGBUS.
    Raises OSError: also for a file that was cut."""
    with path.open("rb") as file:
        try:
            file.seek(8 + int.from_bytes(file.read(8), "little"))  # the header, after its length
            blocks = iter(lambda: bytearray(file.read(2**22)), b"")
            return int(bit_sum(torch.frombuffer(block, dtype=torch.float32) for block in blocks))
        except ValueError as error:  # no place in a file, or no whole number of values
            raise OSError(errno.EIO, f"is damaged ({error})", str(path)) from error


def check_version(path: Path, state: Mapping[str, Any]) -> None:
    """Refuses the state.json of another format. Raises CheckpointError: the version differs; the message says what to
    do."""
    if (version := state.get("version")) != VERSION:
        age = "an older" if isinstance(version, int) and version < VERSION else "another"
        raise CheckpointError(
            f"{path}: is a checkpoint of format version {version}, this program reads version {VERSION}. Resume with {age} "
            "version of Dist Transformer, the one that wrote it, or choose another run.name to train again."
        )


class _Library(BaseModel):
    version: str
    probe: str


class _State(BaseModel):
    """Values of state.json that every resume reads; a file that was edited may hold anything."""

    model_config = ConfigDict(strict=True)

    run_id: str
    step: Count
    batches: Count
    skipped_updates: Count
    total_target_tokens: Count
    position: dict[str, Any]
    recipe: dict[str, Any]
    libraries: dict[str, _Library] = {}
    loss_monitor: dict[str, float] | None = None
    early_stopping: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None


def read_state(path: Path) -> dict[str, Any]:
    """Reads the state of a checkpoint folder to resume from it.

    Raises:
        CheckpointError: it is of another format, or was edited.
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    state = read_json_patiently(path / STATE)
    if isinstance(state, dict):
        check_version(path, state)
    try:
        _State.model_validate(state)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]
        raise CheckpointError(
            f"{path / STATE}: {'.'.join(map(str, why['loc']))}: {why['msg']}: it was edited"
        ) from error
    assert isinstance(state, dict)
    return state


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of one flattened tensor, in one file."""

    start: int
    stop: int
    values: Any  # slice of safetensors: reads only the indexed elements

    def read(self, start: int, stop: int) -> Tensor:
        found: Tensor = self.values[max(start, self.start) - self.start : min(stop, self.stop) - self.start]
        return found


def validation_of(path: Path) -> tuple[dict[str, float | str], dict[str, Any] | None]:
    """Returns the measures of the checkpoint's step, with signatures unless an older version wrote them, {} if it was not
    validated; and the settings of the start that measured, None if such a version did. Errors of a damaged one are raised."""

    def read() -> tuple[dict[str, float | str], dict[str, Any] | None]:
        state = read_json(path / STATE)
        if not (path / LATER).exists():
            return state["validation"] or {}, state.get("settings")
        later = read_json(path / LATER)  # an older version wrote the measures alone
        return later.get("measures", later), later.get("settings", state.get("settings"))

    return patiently(path, read)


def add_validation(path: Path, measures: Mapping[str, float | str], settings: Mapping[str, Any]) -> None:
    """Adds what `validation_of` returns to a checkpoint that was committed without it (rank 0)."""
    if not (path / LATER).exists():  # else an earlier start did, perhaps with other settings
        write_json(path / LATER, {"measures": measures, "settings": settings})


class StateFiles:
    """The tensors of a checkpoint folder, found over all of its files. Opening it reads headers only.

    Raises:
        CheckpointError: another format's version, a damaged file, or fragments that do not tile their tensors.
        MachineError: the disk does not answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            state = read_json_patiently(path / STATE)
            check_version(path, state)
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(shape) for name, shape in state["shapes"].items()}
            files = [path / file_name(rank) for rank in range(state["state_files"])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: {STATE} cannot be read: {type(error).__name__}: {error}") from error
        self._pieces: dict[str, list[_Piece]] = {}
        for file in files:
            self._add(file)
        self._check_tiling()

    def has_part(self, part: str, of_all: bool = False) -> bool:
        """True if any tensor, or all, have this part: moments of a trained run, "ema" if one was kept."""
        return (all if of_all else any)(f"{part}/{name}" in self._pieces for name in self.shapes)

    def read(self, part: str, name: str, start: int, stop: int) -> Tensor | None:
        """Reads elements [start, stop) of the flattened tensor of `shapes`; None if the checkpoint has no such moment or
        average. Raises CheckpointError: a file cannot be read."""
        if (pieces := self._pieces.get(f"{part}/{name}")) is None:
            return None
        try:
            found = [piece.read(start, stop) for piece in pieces if piece.start < stop and piece.stop > start]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}: {part} of {name} cannot be read: {error}") from error
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    def _add(self, file: Path) -> None:
        try:
            opened = patiently(file, lambda: safetensors_file(file))
            starts = json.loads(opened.metadata()["starts"])
            for key in opened.keys():  # noqa: SIM118  (no mapping)
                values = opened.get_slice(key)
                (size,) = values.get_shape()
                pieces = self._pieces.setdefault(key, [])
                if size:
                    pieces.append(_Piece(starts[key], starts[key] + size, values))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.path}: {file.name} cannot be read: {error}") from error

    def _check_tiling(self) -> None:
        if missing := [name for name in self.shapes if f"weight/{name}" not in self._pieces]:
            raise CheckpointError(f"{self.path}: has no weight of {', '.join(missing[:5])}")
        for key, pieces in self._pieces.items():
            name = key.partition("/")[2]
            if name not in self.shapes:
                raise CheckpointError(f"{self.path}: {key} has no shape in {STATE}")
            pieces.sort(key=lambda piece: piece.start)
            size = math.prod(self.shapes[name])
            ends = [0, *(piece.stop for piece in pieces)]
            starts = [*(piece.start for piece in pieces), size]
            for end, start in zip(ends, starts, strict=True):
                if start != end:
                    fault = "are missing" if start > end else "are there twice, or beyond its end"
                    between = f"{min(start, end):,} to {max(start, end):,}"
                    raise CheckpointError(f"{self.path}: of the {size:,} elements of {key}, {between} {fault}")


class Weights(Mapping[str, Tensor]):
    """The complete fp32 weights of a checkpoint by parameter name, each read on access. Raises CheckpointError: as in
    `StateFiles`; or there is no such part.

    Args:
        part: "ema" for their moving average; parameters without one (frozen ones) give their weight.
    """

    def __init__(self, path: Path, part: str = "weight") -> None:
        self._files, self._part = StateFiles(path), part
        if not self._files.has_part(part):
            raise CheckpointError(
                f"{path}: has no moving average of the weights: it was written without training.ema_decay"
            )

    def __getitem__(self, name: str) -> Tensor:
        shape = self._files.shapes[name]
        values = self._files.read(self._part, name, 0, math.prod(shape))
        if values is None:
            values = self._files.read("weight", name, 0, math.prod(shape))
        assert values is not None  # without the weight of a shape it could not be opened
        return values.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files.shapes))

    def __len__(self) -> int:
        return len(self._files.shapes)
