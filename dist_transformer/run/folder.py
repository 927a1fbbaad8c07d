"""Names every file of a run folder, and writes files so that they are whole or not there."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """The folder of one training run. Attributes are paths; nothing is created until it is written."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration of the newest start."""
        return self.path / "config.yaml"

    def config_until(self, step: int) -> Path:
        """The configuration of the starts up to this step, from which a later one went on with another."""
        return self.path / f"config.until_step_{step:08d}.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON record a line: `event` is "train", "validation" or "system"; steps never repeat."""
        return self.path / "metrics.jsonl"

    @property
    def audit(self) -> Path:
        return self.path / "audit.jsonl"

    @property
    def samples(self) -> Path:
        """Sample translations, one JSON record a validation corpus and step; steps never repeat."""
        return self.path / "samples.jsonl"

    @property
    def history(self) -> Path:
        """One JSON record a line of each start of training, the settings that it changed, and its end: `event` is "start",
        "changed" or "end"."""
        return self.path / "history.jsonl"

    @property
    def figures(self) -> Path:
        """The pictures of the run; each start that ends draws them anew."""
        return self.path / "figures"

    @property
    def report(self) -> Path:
        """The page about the run: one file with everything in it."""
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The model folder that `translate` and `evaluate` take."""
        return self.path / "model"

    @property
    def tracking(self) -> Path:
        """The tracker's memory: MLflow run id, newest step sent."""
        return self.path / "tracking.json"

    @property
    def tracking_events(self) -> Path:
        """The tracker's spool: starts, checkpoints, models and status changes, one JSON record a line."""
        return self.path / "tracking_events.jsonl"

    @property
    def upload(self) -> Path:
        """The model as it is being uploaded to MLflow; what a killed upload leaves goes with the next one."""
        return self.path / ".upload"

    @property
    def state(self) -> Path:
        """run.json: what outsiders ask about (state, step, starts, job ids)."""
        return self.path / "run.json"

    @property
    def stop_file(self) -> Path:
        """Create it to ask the run to save and stop at the next step."""
        return self.path / "stop"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def owner(self) -> Path:
        """Who trains in this folder: host, process, job, and a heartbeat, its modification time."""
        return self.path / "owner.json"

    @property
    def slurm(self) -> Path:
        """What was submitted: the exact script, its environment, the code snapshot, the job's logs."""
        return self.path / "slurm"

    @property
    def job(self) -> Path:
        """The newest submission: job id, time, command."""
        return self.slurm / "job.json"

    @property
    def submitted_script(self) -> Path:
        return self.slurm / "train.sbatch"

    @property
    def snapshot(self) -> Path:
        """The code that the job runs, as it was when it was submitted."""
        return self.slurm / "snapshot"

    @property
    def restarts(self) -> Path:
        """The batch script's memory: newest checkpoint at the last restart, restarts without a new one since."""
        return self.slurm / "restarts.json"

    @property
    def attempts(self) -> Path:
        """One JSON record a line of each attempt of a job: `event` is "began" or "ended"."""
        return self.slurm / "attempts.jsonl"

    @property
    def preflight(self) -> Path:
        """What the check of the nodes found, one folder an attempt."""
        return self.slurm / "preflight"

    @property
    def excluded(self) -> Path:
        """Nodes that the run keeps away from by itself, each with the reason."""
        return self.slurm / "excluded.json"

    @property
    def divergence(self) -> Path:
        """Each time training diverged: the step, why, and how the run went on."""
        return self.path / "divergence.json"

    @property
    def crash(self) -> Path:
        """What a rank that failed was doing: exception, configuration and batch, one folder a rank."""
        return self.path / "crash"

    @property
    def profile(self) -> Path:
        """What `train --profile` found: profile.md, and a trace of each rank."""
        return self.path / "profile"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation"
