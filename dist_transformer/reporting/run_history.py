"""Everything that a run folder contains about its run. Nothing is required: missing or torn data is empty or None.

A run may be running, be killed, have no validation, be of an older version.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.config.credentials import holds_secret, is_secret, without_credentials
from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.former_keys import current_settings
from dist_transformer.config.loading import flatten
from dist_transformer.config.metrics import MEASURES, corpus_and_measure, settings_of_measure
from dist_transformer.config.model_size import count_by_part
from dist_transformer.config.schema import Config, ModelConfig
from dist_transformer.config.slurm_schema import CPU_BIND
from dist_transformer.config.yaml_positions import read_yaml
from dist_transformer.errors import ConfigError
from dist_transformer.reporting.curves import Curves, read_curves
from dist_transformer.run.attempts import attempts
from dist_transformer.run.evaluations import evaluations_of
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import Goodput, goodput_of
from dist_transformer.run.metrics_log import read_records
from dist_transformer.run.records import read_record
from dist_transformer.run.status import RunView, look_at

Record = dict[str, Any]
PLACES = ("run.name", "run.root", "data.root", "data.prepared")
"""Settings of a run's location, not of the run itself."""
CHECKPOINT_MEASURES = tuple(key for key in MEASURES if key not in ("token_accuracy", "nll"))


@dataclass(frozen=True)
class Start:
    """One start of training: its record in history.jsonl, and that of its end; {}: none (killed, or still running)."""

    begun: Record
    ended: Record

    @property
    def step(self) -> int:
        return int(self.begun.get("step", 0))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A folder of checkpoints/. `suffix`: "damaged" or "diverged" if it was set aside, else empty."""

    name: str
    step: int
    time: float
    suffix: str
    num_ranks: int | None
    measures: dict[str, float]


@dataclass(frozen=True)
class PreparedCorpus:
    """The folder of the prepared corpus: its report.json, its digest, and its figure of the lengths.

    Attributes:
        vocabularies: sizes of the source and the target vocabulary.
        pieces: identity of its tokenizer.
        validation: identity of its validation corpus, independent of the location of its files.
    """

    folder: Path
    report: Record
    digest: str | None
    picture: bytes | None
    vocabularies: tuple[int, int] | None
    pieces: tuple[Any, Any] | None
    validation: Record | None


@dataclass(frozen=True)
class Best:
    """The best validation by `validation.metric`, or by the loss if that was not measured."""

    measure: str
    step: int
    value: float


@dataclass(frozen=True)
class RunStory:
    """One run, from the files in its folder.

    Attributes:
        settings: config.yaml as dotted keys, without secrets: {"model.d_model": 512}.
        run: run.json.
        samples: records of samples.jsonl, oldest first.
        evaluations, outdated: as from `evaluations_of`.
        changes: records of settings that starts changed, oldest first.
        goodput: where the time of the run went; None: no start is recorded.
        faults: records of silent errors that were found.
    """

    run_dir: RunDir
    name: str
    view: RunView
    settings: dict[str, Any]
    run: Record
    curves: Curves
    samples: list[Record]
    starts: list[Start]
    attempts: list[Record]
    evaluations: dict[str, Record]
    outdated: list[str]
    checkpoints: list[SavedCheckpoint]
    prepared: PreparedCorpus | None
    changes: Sequence[Record] = ()
    goodput: Goodput | None = None
    faults: Sequence[Record] = ()

    @cached_property
    def differing_settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from the defaults, as (value, default), without those of the run's name and files."""
        defaults, corpus = _default_settings(self.settings), CorpusConfig().model_dump(mode="json")
        expected = {key: defaults.get(key, corpus.get(key.rpartition(".")[2])) for key in self.settings}
        differing = (key for key, value in self.settings.items() if value != expected[key] and key not in PLACES)
        return {key: (self.settings[key], expected[key]) for key in differing}

    @property
    def best(self) -> Best | None:
        for measure in (str(self.settings.get("validation.metric", "loss")), "loss"):
            if found := self.best_of(measure):
                return Best(measure, *found)
        return None

    def best_of(self, measure: str) -> tuple[int, float] | None:
        """Step and value of the best validation by a measure, of those that measured it as the newest start does."""
        corpus, name = corpus_and_measure(measure)
        keys = (*settings_of_measure(name), *([f"data.more_validation.{corpus}."] if corpus else []))
        is_metric, since = measure == self.settings.get("validation.metric", "loss"), -1
        for each in self.changes:
            if any(key.startswith(keys) for key in each["settings"]) or (is_metric and each.get("metric_begins_anew")):
                since = int(each.get("step", 0))
        curve = self.curves.of("validation", measure)
        return curve.best(measure, since) if curve else None

    @property
    def num_parameters(self) -> int | None:
        """Number of the model's parameters; None if the settings or the prepared corpus do not determine it."""
        sizes = {name: value for key, value in self.settings.items() if (name := key.removeprefix("model.")) != key}
        vocabularies = self.prepared.vocabularies if self.prepared else None
        if not sizes or not vocabularies:
            return None
        with suppress(ValueError):  # settings of another version
            return count_by_part(ModelConfig.model_validate(sizes), *vocabularies).total
        return None

    @property
    def restart_steps(self) -> list[int]:
        """The steps from which later starts resumed."""
        if self.starts:
            return [start.step for start in self.starts[1:]]
        began = [record for record in self.attempts if record.get("event") == "began"]
        return [_step_of(str(record.get("newest"))) or 0 for record in began[1:]]

    @property
    def trained_seconds(self) -> float | None:
        """Time between the starts of training and their ends; without a history that of the records. None: unknown."""
        times = self.curves.of("train", "time")
        if self.goodput is not None:
            return self.goodput.trained_seconds
        return float(times.values[-1] - times.values[0]) if times is not None and len(times.values) > 1 else None

    @property
    def median_speed(self) -> float | None:
        """Target tokens a second."""
        curve = self.curves.of("train", "tokens_per_second")
        return float(np.median(curve.values)) if curve else None

    @property
    def languages(self) -> tuple[str | None, str | None]:
        source, target = (self.settings.get(f"data.{side}_language") for side in ("source", "target"))
        return str(source) if source else None, str(target) if target else None

    @property
    def jobs(self) -> list[str]:
        """Ids of its Slurm jobs."""
        found = [start.begun.get("slurm_job_id") for start in self.starts]
        found += [record.get("job") for record in self.attempts] + [self.run.get("slurm_job_id")]
        return [*dict.fromkeys(str(job) for job in found if job)]

    @property
    def lacks_evaluation(self) -> bool:
        """True if a test corpus is given that has no scores yet."""
        is_given = any(value for key, value in self.settings.items() if key.startswith("data.test."))
        return is_given and "test" not in self.evaluations

    def measures_of(self, checkpoint: SavedCheckpoint) -> dict[str, float]:
        """Measures in the checkpoint's state, or in metrics.jsonl at its step."""
        if checkpoint.measures:
            return checkpoint.measures
        found = {key: self.curves.of("validation", key) for key in CHECKPOINT_MEASURES}
        return {
            key: float(curve.values[place[0]])
            for key, curve in found.items()
            if curve is not None and len(place := (curve.steps == checkpoint.step).nonzero()[0])
        }


def read_story(run_dir: RunDir) -> RunStory:
    """Reads a run folder; `run_dir.path` is one (cluster.run_ref.is_run_folder)."""
    settings = _settings(run_dir)
    records = [*read_records(run_dir.history)]
    evaluations, outdated = evaluations_of(run_dir)
    return RunStory(
        run_dir=run_dir,
        name=run_dir.path.absolute().name,
        view=look_at(run_dir),
        settings=settings,
        run=read_record(run_dir.state),
        curves=read_curves(run_dir.metrics),
        samples=[record for record in read_records(run_dir.samples) if isinstance(record.get("sentences"), list)],
        starts=starts_of(records),
        attempts=[*attempts(run_dir)],
        evaluations=evaluations,
        outdated=outdated,
        checkpoints=[*_checkpoints(run_dir)],
        prepared=_prepared(run_dir, settings),
        goodput=goodput_of(run_dir, time.time()),
        faults=[record for record in records if record["event"] == "fault"],
        changes=[record for record in records if isinstance(record.get("settings"), dict)],
    )


def starts_of(records: list[Record]) -> list[Start]:
    """The records of history.jsonl in pairs; an end belongs to the start before it."""
    starts: list[Start] = []
    for record in records:
        if record["event"] == "start":
            starts.append(Start(record, {}))
        elif record["event"] == "end" and starts:
            starts[-1] = Start(starts[-1].begun, record)
    return starts


def _default_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the same keys; sizes of the model are those of its preset."""
    defaults = {**flatten(Config.model_validate({"data": {}}).model_dump(mode="json")), "slurm.srun.cpu-bind": CPU_BIND}
    try:
        model = ModelConfig.model_validate({"preset": settings.get("model.preset")}).model_dump(mode="json")
    except ValueError:  # a preset of another version
        return defaults
    return {**defaults, **flatten(model, "model."), "model.preset": defaults["model.preset"]}


def _settings(run_dir: RunDir) -> dict[str, Any]:
    try:
        values = current_settings(read_yaml(run_dir.config).values)
    except ConfigError:
        return {}
    return {key: _without_secret(key, value) for key, value in flatten(values).items()}


def _without_secret(key: str, value: Any) -> Any:
    if key.startswith("slurm.environment.") and is_secret(key.rpartition(".")[2], str(value)):
        return "***"
    if key.startswith(("slurm.setup", "slurm.srun.", "slurm.sbatch.")) and holds_secret(str(value)):
        return "***"  # from a version that accepted it
    return without_credentials(value) if isinstance(value, str) else value


def _checkpoints(run_dir: RunDir) -> Iterator[SavedCheckpoint]:
    for path in sorted(run_dir.checkpoints.glob("step_*")):
        name, _, suffix = path.name.partition(".")
        step = _step_of(name)
        if step is None or suffix in ("tmp", "trash"):  # being written, or being deleted
            continue
        state = read_record(path / "state.json")
        measures = found if isinstance(found := state.get("validation"), dict) else {}
        modified = 0.0
        with suppress(OSError):  # deleted since it was found
            modified = path.stat().st_mtime
        yield SavedCheckpoint(path.name, step, modified, suffix, state.get("num_ranks"), measures)


def _step_of(name: str) -> int | None:
    number = name.removeprefix("step_")
    return int(number) if number.isdecimal() else None


def _prepared(run_dir: RunDir, settings: Mapping[str, Any]) -> PreparedCorpus | None:
    if not isinstance(given := settings.get("data.prepared"), str):
        return None
    path = run_dir.prepared(given)
    picture, manifest = path / "lengths.png", read_record(path / "manifest.json")
    source, target = (manifest.get(f"{side}_vocabulary") for side in ("source", "target"))
    models: Record = manifest["tokenizer"] if isinstance(manifest.get("tokenizer"), dict) else {}
    return PreparedCorpus(
        path,
        read_record(path / "report.json"),
        manifest.get("digest"),
        picture.read_bytes() if picture.is_file() else None,
        (source, target) if isinstance(source, int) and isinstance(target, int) else None,
        (models["source_sha256"], models["target_sha256"]) if "source_sha256" in models else None,
        manifest["recipe"].get("validation") if isinstance(manifest.get("recipe"), dict) else None,
    )
