"""One start of a run within a rank: from its newest whole checkpoint to an outcome. Where the parts of training meet."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from dist_transformer.cli.initial_weights import initialise
from dist_transformer.cli.run_data import RunData
from dist_transformer.cli.run_records import newest_steps, note, open_records
from dist_transformer.cli.run_records import run_id as run_id_of
from dist_transformer.cli.write_model import write_averaged_model
from dist_transformer.config.models import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed import Ranks
from dist_transformer.errors import CheckpointError, DistTransformerError, UserError
from dist_transformer.model.transformer import Transformer
from dist_transformer.run_dir import RunDir
from dist_transformer.stop_request import StopRequest
from dist_transformer.tracking.tracker import Status, Tracker
from dist_transformer.training import checkpoints
from dist_transformer.training.checkpoints import Checkpoint
from dist_transformer.training.crash import write_crash
from dist_transformer.training.divergence import Diverged, LossMonitor, Recovery
from dist_transformer.training.engine import Engine
from dist_transformer.training.feed import Feed
from dist_transformer.training.largest_batch import dry_run, find_max_tokens, largest_shapes
from dist_transformer.training.loop import Outcome, Trainer
from dist_transformer.training.objective import Objective
from dist_transformer.training.records import Journal, Progress
from dist_transformer.training.report import ProgressBar, log_outlook, offloaded_bytes, state_bytes
from dist_transformer.training.reporter import Reporter
from dist_transformer.training.saver import Saver
from dist_transformer.training.schedule import learning_rate
from dist_transformer.training.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What stays the same for every start of a run within this process."""

    config: Config
    run_dir: RunDir
    ranks: Ranks
    data: RunData
    stop: StopRequest

    @property
    def manifest(self) -> Manifest:
        return self.data.manifest


def train(run: Run, recovery: Recovery) -> tuple[Outcome, int]:
    """Goes on from the newest whole checkpoint until the end, a stop, or a divergence (collective); the last step.

    Raises:
        Diverged: on every rank; the checkpoint in flight is written, and the records are closed.
    """
    run_id = run.ranks.from_first(run_id_of(run.run_dir) if run.ranks.is_first else None)
    checkpoint = _newest_checkpoint(run, run_id)
    config = _with_precision(run.config, recovery)
    torch.manual_seed(config.run.seed)
    objective = _objective(config, run.manifest)
    origin = {}
    if checkpoint is None and config.training.init_from is not None:
        origin = initialise(objective.model, config, run.manifest, run.ranks)
    config = _with_token_budget(config, checkpoint, objective, run)
    data = replace(run.data, config=config)
    progress = _progress(data, checkpoint)
    engine = Engine(objective, config.training, config.optimizer, run.ranks)
    if checkpoint is not None:
        checkpoints.load(checkpoint, engine)
    journal, tracker = None, None
    if run.ranks.is_first:
        journal, tracker = open_records(config, run.run_dir, run.ranks, data.folder, data.manifest, progress, origin)
    status: Status = "FAILED"
    try:
        outcome = _train(
            replace(run, config=config, data=data), engine, checkpoint, progress, journal, recovery, run_id
        )
        if outcome is Outcome.FINISHED:
            _write_model(config, run, tracker)
        status = "FINISHED" if outcome is Outcome.FINISHED else "SCHEDULED"
        return outcome, progress.step
    except Diverged:
        status = "SCHEDULED"
        engine.close()
        raise
    finally:
        if tracker is not None:
            tracker.close(status)


def _train(
    run: Run,
    engine: Engine,
    checkpoint: Checkpoint | None,
    progress: Progress,
    journal: Journal | None,
    recovery: Recovery,
    run_id: str,
) -> Outcome:
    config, ranks, data = run.config, run.ranks, run.data
    recorded = ranks.from_first(newest_steps(run.run_dir) if ranks.is_first else None)
    with Watchdog(config.training.hang_seconds, ranks) as watchdog:
        watchdog.progress("reading the validation corpus")
        reporter = Reporter(config, ranks, engine, data.validation(), journal, recorded)
        monitor = LossMonitor(config.divergence, checkpoint.state["loss_monitor"] if checkpoint else None)
        saver = Saver(run.run_dir, ranks, config.checkpoints, watchdog.progress)
        identity = {"recipe": data.recipe(), "run_id": run_id}
        trainer = Trainer(
            config, ranks, engine, saver, reporter, monitor, progress, identity,
            lambda step: recovery.learning_rate_factor * learning_rate(config, step),
        )  # fmt: skip
        if checkpoint is not None:
            reporter.restore(checkpoint.state["interval"])
            for step, loss in checkpoint.state["losses_to_judge"]:
                monitor.add(step, math.nan if loss is None else loss)
        note(run.run_dir, ranks, "running", progress.step)
        log_outlook(config, data.manifest, ranks.num_ranks)
        log.info("start      step %d%s", progress.step, f", resumed from {checkpoint.path}" if checkpoint else "")
        if config.training.dry_run:
            dry_run(engine, largest_shapes(config.data), ranks, data.manifest.eos_id, watchdog.progress)
        watchdog.progress("reading the first windows")
        with ProgressBar(config.training.max_steps, progress.step) as bar, _crash_records(run, trainer):
            return trainer.run(_feed(run, trainer), bar, watchdog)


@contextmanager
def _crash_records(run: Run, trainer: Trainer) -> Iterator[None]:
    """What all ranks agree on lets the checkpoint in flight be ended; for all else it is written down what was done."""
    try:
        yield
    except (Diverged, DistTransformerError) as error:
        if isinstance(error, Diverged) or error.is_agreed:
            trainer.end_save()
        raise
    except Exception as error:
        write_crash(run.run_dir, run.ranks, error, run.config, trainer.progress, trainer.current_batch)
        raise


def _objective(config: Config, manifest: Manifest) -> Objective:
    training = config.training
    model = Transformer(
        config.model,
        manifest.source_vocabulary,
        manifest.target_vocabulary,
        manifest.pad_id,
        activation_checkpointing=training.activation_checkpointing,
    )
    return Objective(model, training.label_smoothing, training.precision)


def _feed(run: Run, trainer: Trainer) -> Feed:
    settings, ranks, progress = run.config.data, run.ranks, trainer.progress
    batch = progress.batches
    loader = run.data.loader(progress.position, batch, ranks.rank, ranks.num_ranks, settings.loader_workers)
    return Feed(
        loader, ranks, run.manifest.training, settings.lanes, batch,
        lambda: trainer.news(run.stop.reason() is not None),
    )  # fmt: skip


def _newest_checkpoint(run: Run, run_id: str) -> Checkpoint | None:
    """Rank 0 looks and verifies; every rank takes the same one."""
    found: Checkpoint | CheckpointError | None = None
    if run.ranks.is_first:
        try:
            found = checkpoints.newest_whole(run.run_dir, run_id)
        except CheckpointError as error:
            found = error
    found = run.ranks.from_first(found)
    if isinstance(found, CheckpointError):
        raise found.agreed()
    return found


def _with_precision(config: Config, recovery: Recovery) -> Config:
    if not recovery.switch_to_bf16 or config.training.precision != "fp16":
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"precision": "bf16"})})


def _with_token_budget(config: Config, checkpoint: Checkpoint | None, objective: Objective, run: Run) -> Config:
    """`data.max_tokens: auto` becomes a number at the first start, and stays that number (collective)."""
    if config.data.max_tokens != "auto":
        return config
    if checkpoint is not None:
        found = checkpoint.state["recipe"]["data.max_tokens"]
    else:
        training, ranks = config.training, run.ranks
        parameters = sum(parameter.numel() for parameter in objective.parameters())
        held = state_bytes(parameters, training, ranks.num_ranks)
        if ranks.device.type == "cpu":
            held += offloaded_bytes(parameters, training, ranks.num_ranks)
        found = find_max_tokens(objective, held, config.data, ranks, training.precision)
    return config.model_copy(update={"data": config.data.model_copy(update={"max_tokens": found})})


def _progress(data: RunData, checkpoint: Checkpoint | None) -> Progress:
    if checkpoint is None:
        return Progress(data.start())
    names = ("step", "batches", "skipped_updates", "total_target_tokens")
    return Progress(data.position_of(checkpoint), **{name: checkpoint.state[name] for name in names})


def _write_model(config: Config, run: Run, tracker: Tracker | None) -> None:
    """The model folder, by rank 0; a failure is every rank's (collective)."""
    problem, run_dir = None, run.run_dir
    if run.ranks.is_first:
        try:
            used = write_averaged_model(config, run_dir, run.data.folder, run.manifest, run_dir.model)
            log.info("model      %s: average of %d checkpoints", run_dir.model, len(used))
        except (UserError, OSError) as error:
            problem = f"{run_dir.model} could not be written: {error}"
    if (problem := run.ranks.from_first(problem)) is not None:
        raise CheckpointError(problem).agreed()
    if tracker is not None:
        tracker.model_written(run_dir.model, {})
