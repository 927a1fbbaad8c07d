"""Content sent to MLflow: points of curves, references to local checkpoints and models, and uploaded models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UPLOAD_MEGABYTES = 2000
"""Largest model folder that is uploaded (a model of 500 million weights); of a larger one MLflow has path and digest."""


@dataclass(frozen=True)
class Point:
    """One value of one curve; `time_ms` is unix time in milliseconds."""

    key: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class Model:
    """A model folder to be sent to MLflow. `upload`: a folder that does not exist yet, for the copy in MLflow's format;
    `decoding`: the settings it translates with; `register_as`: None for none.
    """

    folder: Path
    sha256: str
    step: int
    upload: Path
    decoding: Mapping[str, Any] = field(default_factory=dict)
    register_as: str | None = None
    alias: str | None = None
    by_hand: bool = False
    """True if requested by a user: the alias is set even if this version had it before."""


def megabytes_of(folder: Path) -> float:
    """Size of all files below `folder`, in units of 2**20 bytes. Raises as `files_of`."""
    return sum(file.stat().st_size for file in files_of(folder)) / 2**20


def files_of(folder: Path) -> list[Path]:
    """All files below `folder`, sorted. Raises FileNotFoundError if it is no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there any more")
    return sorted(path for path in folder.rglob("*") if path.is_file())
