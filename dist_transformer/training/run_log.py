"""Records of a run beside its checkpoints: metrics files, run.json, its MLflow run. Rank 0 writes them."""

import logging
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from dist_transformer import __version__
from dist_transformer.config.credentials import without_secrets
from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.loading import flatten, to_yaml, with_absolute_paths
from dist_transformer.config.metrics import is_better
from dist_transformer.config.model_size import count_by_part
from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest, json_digest
from dist_transformer.data.sources.files import corpus_fingerprint, has_address
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import DataError, MachineError
from dist_transformer.files import flush_to_disk, is_file, read_json, read_json_patiently, write_json, write_text
from dist_transformer.plugins import find
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import Counted, goodput_of
from dist_transformer.run.metrics_log import MetricsLog, read_records
from dist_transformer.run.records import read_record, sound
from dist_transformer.run.snapshot import git_commit
from dist_transformer.tracking.tracker import Tracker
from dist_transformer.training.checkpoint import checkpoints, retention
from dist_transformer.training.checkpoint.tensor_files import STATE, add_validation, validation_of
from dist_transformer.training.metrics.system_metrics import process_began
from dist_transformer.training.run import Run
from dist_transformer.training.train_state import TrainState

log = logging.getLogger(__name__)

_SLURM_TAGS = {"job_id": "SLURM_JOB_ID", "nodes": "SLURM_STEP_NODELIST", "restart": "SLURM_RESTART_COUNT",
               "partition": "SLURM_JOB_PARTITION", "cluster": "SLURM_CLUSTER_NAME"}  # fmt: skip


class RunLog:
    """Records of one start: metrics.jsonl, samples.jsonl, audit.jsonl, history.jsonl and the MLflow run. Rank 0 only.

    Attributes:
        audit: row ids of each batch; None without `data.audit`.
        tracker: None without tracking.
    """

    def __init__(self, config: Config, run_dir: RunDir, tracker: Tracker | None, echo: TextIO | None) -> None:
        self.metrics = MetricsLog(run_dir.metrics, echo)
        self.audit = MetricsLog(run_dir.audit) if config.data.audit else None
        self.tracker, self._run_dir, self._samples = tracker, run_dir, MetricsLog(run_dir.samples)
        self._checkpoints, self._metric, self._counted = config.checkpoints, config.validation.metric, Counted()

    def rewind(self, state: TrainState) -> None:
        """Drops the records that an earlier start wrote beyond `state`."""
        self.metrics.rewind(state.step)
        self._samples.rewind(state.step)
        if self.audit is not None:
            self.audit.rewind(state.batches, "batch", in_place=True)

    def flush(self) -> None:
        """Brings the records onto the disk, so that a power loss does not take those before a checkpoint and leave it."""
        run_dir = self._run_dir
        for path in (run_dir.metrics, run_dir.samples, run_dir.audit, run_dir.tracking_events):
            with _warned_of_disk(path), suppress(FileNotFoundError):
                flush_to_disk(path)

    def checkpoint_saved(self, step: int, path: Path, write_seconds: float) -> Iterator[Path]:
        """Deletes checkpoints that are not kept, yielding each, and reports this one to the history, MLflow and run.json."""
        add_to_history(self._run_dir, "saved", step, {"write_seconds": round(write_seconds, 3)})
        kept: list[Path] = []
        with _warned_of_disk(path):
            kept = yield from retention.retain(self._run_dir, self._checkpoints, self._metric, path)
        self._report(path, kept)
        with _warned_of_disk(path):
            write_json(self._run_dir.state, {**_noted(self._run_dir), "step": step, "time": round(time.time(), 3)})
            if (found := goodput_of(self._run_dir, time.time(), self._counted)) is not None:
                self.metrics.append("goodput", step, found.shares())

    def validated_later(self, step: int, measures: Mapping[str, float | str], settings: Mapping[str, Any]) -> None:
        """Adds measures, with this start's settings, to the checkpoint of `step`, which an earlier start wrote without."""
        path = self._run_dir.checkpoints / checkpoints.folder_name(step)
        with _warned_of_disk(path):
            add_validation(path, measures, settings)
        self._report(path)

    def samples_written(self, step: int, corpora: list[dict[str, Any]]) -> None:
        """Records sample translations: for each corpus its name and its `sentences`."""
        for corpus in corpora:
            self._samples.append("samples", step, corpus)
        if self.tracker is not None and corpora:
            self.tracker.samples_written(step)

    def validation_failed(self, step: int, reason: str) -> None:
        """Records a step that could not be validated."""
        add_to_history(self._run_dir, "failed validation", step, {"reason": without_secrets(reason)})

    def report_unreported(self, step: int) -> None:
        """Reports the checkpoint that this start resumes from, if the one that wrote it was killed before it could."""
        path = self._run_dir.checkpoints / checkpoints.folder_name(step)
        events = read_records(self._run_dir.tracking_events)
        if path.is_dir() and not any(event["event"] == "checkpoint" and event.get("step") == step for event in events):
            self._report(path)

    def _report(self, path: Path, kept: Sequence[Path] = ()) -> None:
        if self.tracker is None:
            return
        with _warned_of_disk(path):
            measures = {name: value for name, value in validation_of(path)[0].items() if not isinstance(value, str)}
            state = {**read_json(path / STATE), "validation": measures}
            names = [one.name for one in kept or checkpoints.saved(self._run_dir)]
            self.tracker.checkpoint_saved(state["step"], path, measures, is_best_so_far(state, self._metric), names)


def open_run_log(run: Run, state: TrainState, tags: dict[str, str]) -> RunLog:
    """Begins the records of this start (rank 0): drops those of an earlier one beyond `state`, then starts MLflow's.

    `tags`: tags of the MLflow run: origin of the initial weights, changed settings.
    """
    config, run_dir = run.config, run.run_dir
    write_text(run_dir.config, to_yaml(with_absolute_paths(config, run.data.folder)))
    if config.model.plugin is not None:
        plugin = find("model.plugin", config.model.plugin)
        write_text(run_dir.plugin, plugin.file.read_bytes().decode())
        log.info("plug-in    %s; mfu, memory and FLOPs are those of our own network with these sizes", plugin.file)
    run_log = RunLog(config, run_dir, None, sys.stdout if run.terminal.as_json else None)
    run_log.rewind(state)
    if config.tracking.enabled:
        run_log.tracker = _start_tracker(run, tags)
    if run_log.tracker is not None:
        run_log.report_unreported(state.step)
    return run_log


def _start_tracker(run: Run, origin: dict[str, str]) -> Tracker:
    """Starts MLflow's tracker: parameters, data, tags by which runs are found; `origin`: those that this start found."""
    config, prepared, manifest = run.config, run.data.folder, run.data.manifest
    tracker = Tracker(run.run_dir, config.tracking, config.run.name, Path(config.run.root), run.run_id)
    config = with_absolute_paths(config, prepared)  # the same whether the YAML file or the run folder was given
    tags = {**_tags(config, run.ranks, manifest), **origin}
    settings = flatten(config.model_dump(mode="json"))
    parameters = {key: str(value) for key, value in settings.items() if value is not None}
    tracker.start(parameters, tags, to_yaml(config), _datasets(config, prepared, manifest))
    return tracker


def _tags(config: Config, ranks: Ranks, manifest: Manifest) -> dict[str, str]:
    parameters = count_by_part(config.model, manifest.source_vocabulary, manifest.target_vocabulary).total
    commit = git_commit()
    return {
        "languages": f"{config.data.source_language}-{config.data.target_language}",
        "model": config.model.preset,
        "num_parameters": str(parameters),
        "num_ranks": str(ranks.num_ranks),
        "num_nodes": str(-(-ranks.num_ranks // ranks.ranks_per_node)),
        "host": platform.node(),
        "device": ranks.device.type,
        "zero_stage": str(config.training.zero_stage),
        "precision": config.training.precision,
        "data_digest": manifest.digest,
        "version": __version__,
        **({"git_commit": commit} if commit else {}),
        **{f"slurm.{key}": os.environ[name] for key, name in _SLURM_TAGS.items() if name in os.environ},
    }


def _datasets(config: Config, prepared: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """Describes each prepared corpus, and the held-out ones that are read as text."""
    splits = [
        {
            "name": name,
            "context": "training" if name in manifest.training else "validation",
            "digest": manifest.digest,
            "source": str(prepared),
            "rows": split.rows,
            "source_tokens": split.source_tokens,
            "target_tokens": split.target_tokens,
        }
        for name, split in manifest.splits.items()
    ]
    corpora = [(name, "validation", corpus) for name, corpus in config.data.more_validation.items()]
    if config.data.test is not None:
        corpora.append(("test", "test", config.data.test))
    named = [
        {
            "name": name,
            "context": context,
            "digest": _digest(corpus, config.data),
            "source": corpus.model_dump_json(exclude_defaults=True),
        }
        for name, context, corpus in corpora
    ]
    return [*splits, *named]


def _digest(corpus: CorpusConfig, data: DataConfig) -> str:
    """Returns a digest of a corpus's files if they are on a disk, else of its description, without network access."""
    if (corpus.source or corpus.path) and not has_address(corpus, data):
        try:
            return json_digest(corpus_fingerprint(corpus, data))
        except (DataError, MachineError) as error:
            log.warning("tracking   %s", error)
    return json_digest(corpus.model_dump(mode="json"))


def note(run_dir: RunDir, ranks: Ranks, state: str, step: int | None = None, reason: str = "") -> None:
    """Records the state of a run in run.json, for people and scripts, and in its history; no step: the one before."""
    if not ranks.is_rank_zero:
        return
    before = {"starts": 0, "step": 0, **_noted(run_dir)}
    step = before["step"] if step is None else step
    write_json(
        run_dir.state,
        {
            **({"run_id": before["run_id"]} if "run_id" in before else {}),
            "state": state,
            "step": step,
            "starts": before["starts"] + (state == "running"),
            "num_ranks": ranks.num_ranks,
            "host": platform.node(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            "version": __version__,
            "time": round(time.time(), 3),
        },
    )
    if state == "running":
        add_to_history(run_dir, "start", step, _start_of(run_dir, ranks))
    else:
        add_to_history(run_dir, "end", step, {"state": state, "reason": without_secrets(reason)})


def add_to_history(run_dir: RunDir, event: str, step: int, values: dict[str, Any]) -> None:
    """Adds a record to history.jsonl, which no resume shortens (rank 0). An error of the disk is only a warning."""
    with _warned_of_disk(run_dir.history):
        history = MetricsLog(run_dir.history)
        history.append(event, step, values)
        history.close()


def is_best_so_far(state: Mapping[str, Any], metric: str) -> bool:
    """True if the checkpoint of this `state` was validated at its step, with a better result than any step before."""
    stopping = state.get("early_stopping") or {}
    best = stopping.get("best") if stopping.get("metric") == metric else None
    if best is not None and stopping["best_step"] == state["step"]:
        return True
    # The last validation of a run may not be at a regular step, and is then not in `stopping`.
    value = float((state["validation"] or {}).get(metric, math.nan))
    return math.isfinite(value) and is_better(metric, value, math.nan if best is None else float(best))


@contextmanager
def _warned_of_disk(path: Path) -> Iterator[None]:
    """Converts errors of the disk to warnings: a full disk must not end training, least of all on one rank alone."""
    try:
        yield
    except (OSError, MachineError) as error:
        log.warning("%s: %s", path, error)


def _start_of(run_dir: RunDir, ranks: Ranks) -> dict[str, Any]:
    before_seen = read_record(run_dir.owner).get("before_seen")
    return {
        "began": process_began(),
        **({} if before_seen is None else {"before_seen": before_seen}),
        "num_ranks": ranks.num_ranks,
        "nodes": [os.environ.get("SLURM_STEP_NODELIST") or platform.node()],
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "device": ranks.device.type,
        "version": __version__,
    }


def run_id(run_dir: RunDir) -> str:
    """Returns the unique id of this run; drawn once (rank 0, with the run folder's lock held).

    A folder without run.json but with checkpoints is a copy made by a person: it continues under their id.
    """
    before = {"state": "starting", "starts": 0, "step": 0, **_noted(run_dir)}
    if "run_id" not in before:
        before["run_id"] = checkpoints.newest_run_id(run_dir) or secrets.token_hex(8)
        write_json(run_dir.state, before)
    return str(before["run_id"])


def _noted(run_dir: RunDir) -> dict[str, Any]:
    """Reads run.json; empty if it is missing or damaged: its content is in the checkpoints too. MachineError if it cannot
    be read now."""
    if not is_file(run_dir.state):
        return {}
    try:
        noted = read_json_patiently(run_dir.state)
    except ValueError as error:
        log.warning("%s: is damaged (%s), and written anew", run_dir.state, error)
        return {}
    return sound(noted) if isinstance(noted, dict) else {}
