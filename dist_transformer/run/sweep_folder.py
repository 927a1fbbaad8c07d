"""The folder of a sweep: its specification, one run folder for each point, and the code that all of them run.

sweep.yaml     the file that was submitted
sweep.json     name, id and points: for each its task and its settings
task_0, ...    run folders
slurm/         the script, the code snapshot, the newest submission
tracking.json  the parent run in MLflow of the points' runs
prepared       a link to the prepared corpora of the folder that the sweep is in, shared by all its runs
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record


@dataclass(frozen=True)
class SweepDir:
    """The folder of one sweep. Attributes are paths; nothing is created until it is written."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path / "sweep.yaml"

    @property
    def state(self) -> Path:
        return self.path / "sweep.json"

    @property
    def tracking_lock(self) -> Path:
        return self.path / ".tracking.lock"

    @property
    def prepared(self) -> Path:
        return self.path / "prepared"

    @property
    def common(self) -> RunDir:
        """Folder of what the sweep shares (see above) and of its newest submission, under their names in a run folder."""
        return RunDir(self.path)

    def task(self, number: int) -> RunDir:
        """The run folder of a point."""
        return RunDir(self.path / f"task_{number}")


@dataclass(frozen=True)
class SweepState:
    """The content of sweep.json. `points`: settings of each task."""

    name: str
    uid: str
    points: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        points = [{"task": task, "overrides": point} for task, point in enumerate(self.points)]
        return {"name": self.name, "uid": self.uid, "points": points}


def read_sweep_state(folder: SweepDir) -> SweepState | None:
    """Reads sweep.json; None if the folder is no sweep.

    Raises:
        UserError: it is damaged.
    """
    if not folder.state.is_file():
        return None
    read = read_record(folder.state)
    points = read.get("points", [])
    if not {"name", "uid", "points"} <= read.keys() or not all("overrides" in point for point in points):
        raise UserError(
            f"{folder.state}: is damaged, or of another version: expected name, uid and points of a sweep; put it back from "
            "a copy, or remove the folder's sweep.json to have its runs as runs of their own"
        )
    return SweepState(read["name"], read["uid"], [point["overrides"] for point in points])


def sweep_of(run_dir: RunDir) -> SweepDir | None:
    """Returns the sweep that a run folder is a point of; None for a run on its own."""
    folder = SweepDir(run_dir.path.absolute().parent)
    return folder if run_dir.name.startswith("task_") and folder.state.is_file() else None
