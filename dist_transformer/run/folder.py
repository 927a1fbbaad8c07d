"""Names of all files of a run folder."""

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

    @property
    def plugin(self) -> Path:
        """A copy of the file of `model.plugin`, which is never executed."""
        return self.path / "plugin.py"

    def config_until(self, step: int) -> Path:
        """The configuration of the starts up to this step, from which a later start resumed with another one."""
        return self.path / f"config.until_step_{step:08d}.yaml"

    @property
    def lexicon(self) -> Path:
        """Probabilities of target tokens given source tokens, for `training.guided_alignment`."""
        return self.path / "lexicon.npz"

    @property
    def metrics(self) -> Path:
        """One JSON record a line: `event` is "train", "validation", "system" or "goodput"; steps never repeat."""
        return self.path / "metrics.jsonl"

    @property
    def audit(self) -> Path:
        return self.path / "audit.jsonl"

    @property
    def samples(self) -> Path:
        """Sample translations, one JSON record for each validation corpus and step; steps never repeat."""
        return self.path / "samples.jsonl"

    @property
    def history(self) -> Path:
        """One JSON record a line for each start of training, the settings that it changed, and its end: `event` is
        "start", "changed", "failed validation", "fault" or "end"."""
        return self.path / "history.jsonl"

    @property
    def report(self) -> Path:
        """The report of the run: one file that contains its style and figures."""
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
        """The delivery state of the tracker: MLflow run id, newest step sent."""
        return self.path / "tracking.json"

    @property
    def tracking_events(self) -> Path:
        """The tracker's outbox: starts, checkpoints, models and status changes, one JSON record a line."""
        return self.path / "tracking_events.jsonl"

    @property
    def upload(self) -> Path:
        """The model as it is being uploaded to MLflow; the next upload removes the rest of a killed one."""
        return self.path / ".upload"

    @property
    def state(self) -> Path:
        """run.json: the public state of the run (state, step, starts, job ids)."""
        return self.path / "run.json"

    @property
    def stop_file(self) -> Path:
        """Stop file: creating it asks the run to save and stop at the next step."""
        return self.path / "stop"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def owner(self) -> Path:
        """The process that trains in this folder: host, pid, job; its modification time is the heartbeat."""
        return self.path / "owner.json"

    @property
    def slurm(self) -> Path:
        """The submission: the exact script, its environment, the code snapshot, the job's logs."""
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
        """The code that the job runs: a copy made at submission."""
        return self.slurm / "snapshot"

    @property
    def restarts(self) -> Path:
        """State of the batch script: newest checkpoint at the last restart, restarts without a new one since."""
        return self.slurm / "restarts.json"

    @property
    def attempts(self) -> Path:
        """One JSON record a line for the start and the end of each attempt of a job: `event` is "began" or "ended"."""
        return self.slurm / "attempts.jsonl"

    @property
    def preflight(self) -> Path:
        """Results of the check of the nodes, one folder for each attempt."""
        return self.slurm / "preflight"

    @property
    def excluded(self) -> Path:
        """Nodes that the run excludes from its jobs, each with the reason."""
        return self.slurm / "excluded.json"

    @property
    def divergence(self) -> Path:
        """The divergences of training, each with its step, its cause and the reaction of the run."""
        return self.path / "divergence.json"

    @property
    def compiled(self) -> Path:
        """Kernels of `training.compile_layers`, which a later start finds again; torch's compiler names its files."""
        return self.path / "compiled"

    @property
    def profile(self) -> Path:
        """Results of `train --profile`: a table and a trace of each rank."""
        return self.path / "profile"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation"
