"""Names of all files of a run folder."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class _At:
    """A path in a run folder, as an attribute of RunDir."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __get__(self, run_dir: "RunDir", _: Any) -> Path:
        return run_dir.path / self.place


@dataclass(frozen=True)
class RunDir:
    """The folder of one training run. Attributes are paths; nothing is created until it is written."""

    path: Path

    config = _At("config.yaml")
    """The resolved configuration of the newest start."""
    plugin = _At("plugin.py")
    """A copy of the file of `model.plugin`, which is never executed."""
    lexicon = _At("lexicon.npz")
    """Probabilities of target tokens given source tokens, for `training.guided_alignment`."""
    metrics = _At("metrics.jsonl")
    """One JSON record a line: `event` is "train", "validation", "system" or "goodput"; steps never repeat."""
    audit = _At("audit.jsonl")
    samples = _At("samples.jsonl")
    """Sample translations, one JSON record for each validation corpus and step; steps never repeat."""
    history = _At("history.jsonl")
    """One JSON record a line for each start of training, the settings that it changed, and its end: `event` is "start",
    "changed", "failed start" (of a finished run), "failed validation", "fault" or "end"."""
    report = _At("report.html")
    """The report of the run: one file that contains its style and figures."""
    log = _At("train.log")
    checkpoints = _At("checkpoints")
    model = _At("model")
    """The model folder that `translate` and `evaluate` take."""
    tracking = _At("tracking.json")
    """The delivery state of the tracker: MLflow run id, newest step sent."""
    tracking_events = _At("tracking_events.jsonl")
    """The tracker's outbox: starts, checkpoints, models and status changes, one JSON record a line."""
    upload = _At(".upload")
    """The model as it is being uploaded to MLflow; the next upload removes the rest of a killed one."""
    state = _At("run.json")
    """run.json: the public state of the run (state, step, starts, job ids)."""
    stop_file = _At("stop")
    """Stop file: creating it asks the run to save and stop at the next step."""
    lock = _At("lock")
    owner = _At("owner.json")
    """The process that trains in this folder: host, pid, job; its modification time is the heartbeat."""
    slurm = _At("slurm")
    """The submission: the exact script, its environment, the code snapshot, the job's logs."""
    submit_lock = _At("slurm/submit.lock")
    """Held by a submission, and removed at its end."""
    job = _At("slurm/job.json")
    """The newest submission: job id, time, command."""
    submitted_script = _At("slurm/train.sbatch")
    snapshot = _At("slurm/snapshot")
    """The code that the job runs: a copy made at submission."""
    restarts = _At("slurm/restarts.json")
    """State of the batch script: newest checkpoint at the last restart, restarts without a new one since."""
    attempts = _At("slurm/attempts.jsonl")
    """One JSON record a line for the start and the end of each attempt of a job: `event` is "began" or "ended"."""
    preflight = _At("slurm/preflight")
    """Results of the check of the nodes, one folder for each attempt."""
    excluded = _At("slurm/excluded.json")
    """Nodes that the run excludes from its jobs, each with the reason."""
    divergence = _At("divergence.json")
    """The divergences of training, each with its step, its cause and the reaction of the run."""
    compiled = _At("compiled")
    """Kernels for GPUs, which a later start finds again; Triton names its files."""
    profile = _At("profile")
    """Results of `train --profile`: a table and a trace of each rank."""
    evaluation = _At("evaluation")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def quoted(self) -> str:
        """The folder as an argument of a command that a user pastes."""
        return shlex.quote(str(self.path))

    def of_run(self) -> list[Path]:
        """Returns the paths in the folder that a run writes; whatever else is there is a user's."""
        names = {at.place.partition("/")[0] for at in vars(RunDir).values() if isinstance(at, _At)}
        return [self.path / name for name in sorted(names)]

    def prepared(self, given: str) -> Path:
        """The prepared corpus `given`; if it is gone from a folder of runs, that beside the run folder, which moved with it."""
        moved = self.path.absolute().parent / "prepared" / Path(given).name
        is_gone = Path(given).parent.name == "prepared" and not (Path(given) / "manifest.json").is_file()
        return moved if is_gone and (moved / "manifest.json").is_file() else Path(given)

    def config_until(self, step: int) -> Path:
        """The configuration of the starts up to this step, from which a later start resumed with another one."""
        return self.path / f"config.until_step_{step:08d}.yaml"
