"""One rank of a training run, from joining the group to the model folder: where the parts of training meet."""

import contextlib
import logging
import os
import platform
import sys
import traceback
from pathlib import Path

import filelock
import torch

from dist_transformer import distributed
from dist_transformer.cli.prepare import prepare_with_progress
from dist_transformer.cli.run_data import RunData, open_run_data
from dist_transformer.cli.run_records import newest_steps, note, open_records
from dist_transformer.cli.write_model import write_averaged_model
from dist_transformer.config.models import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed import Ranks
from dist_transformer.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    CheckpointError,
    DataError,
    MachineError,
    UserError,
)
from dist_transformer.model.transformer import Transformer
from dist_transformer.run_dir import RunDir
from dist_transformer.stop_request import StopRequest
from dist_transformer.tracking.tracker import Status, Tracker
from dist_transformer.training import checkpoints
from dist_transformer.training.checkpoints import Checkpoint
from dist_transformer.training.engine import Engine
from dist_transformer.training.feed import Feed
from dist_transformer.training.loop import Outcome, Trainer
from dist_transformer.training.objective import Objective
from dist_transformer.training.records import Progress
from dist_transformer.training.report import ProgressBar, log_outlook
from dist_transformer.training.watchdog import Watchdog

log = logging.getLogger(__name__)

LOCK_SECONDS = 20
"""A rank that was killed may hold the lock of the run folder until its node notices."""


def train_rank(config: Config, run_dir: RunDir, stop: StopRequest) -> int:
    """Trains as the rank that the environment names; alone without RANK. Returns the exit code.

    Raises:
        UserError: on every rank; the process must then leave without touching its group.
    """
    folder, manifest = prepare_with_progress(config, stop)
    ranks = distributed.join(config.training.hang_seconds)
    torch.set_num_threads(config.training.threads_per_rank or _default_threads(ranks))
    lock = _lock(run_dir, ranks, stop)  # before the first word into the run folder: it may be another job's
    try:
        _refuse_different_corpora(folder, manifest, ranks)
        code = _train(config, run_dir, ranks, open_run_data(config, folder, manifest), stop)
    except UserError as error:
        _note_failure(run_dir, ranks, str(error))
        raise
    except OSError as error:
        message = f"{error}. Is the disk of {run_dir.path} or of the prepared corpus full, or gone? Start again when it is mended"
        _note_failure(run_dir, ranks, message)
        raise MachineError(message) from error
    except Exception:  # noqa: BLE001  (the last line of defence: say it and leave, so that the other ranks can)
        print(f"rank {ranks.rank} of {ranks.num_ranks} on {platform.node()} failed:", file=sys.stderr)
        traceback.print_exc()
        _note_failure(run_dir, ranks, traceback.format_exc())
        sys.stderr.flush()
        os._exit(EXIT_FAILED)
    lock.release()
    distributed.leave()
    return code


def _train(config: Config, run_dir: RunDir, ranks: Ranks, data: RunData, stop: StopRequest) -> int:
    _set_up_logging(run_dir, ranks)
    checkpoint = _newest_checkpoint(run_dir, ranks)
    progress = _progress(data, checkpoint)
    torch.manual_seed(config.run.seed)
    manifest = data.manifest
    model = Transformer(config.model, manifest.source_vocabulary, manifest.target_vocabulary, manifest.pad_id)
    engine = Engine(
        Objective(model, config.training.label_smoothing, config.training.precision),
        config.training, config.optimizer, ranks,
    )  # fmt: skip
    if checkpoint is not None:
        checkpoints.load(checkpoint, engine)
    journal, tracker = None, None
    if ranks.is_first:
        journal, tracker = open_records(config, run_dir, ranks, data.folder, manifest, progress)
    status: Status = "FAILED"
    try:
        recorded = ranks.from_first(newest_steps(run_dir) if ranks.is_first else None)
        with Watchdog(config.training.hang_seconds, ranks.rank) as watchdog:
            watchdog.progress("reading the validation corpus")
            validation = data.validation()
            trainer = Trainer(config, run_dir, ranks, engine, validation, data.recipe(), journal, progress, recorded)
            if checkpoint is not None:
                trainer.restore(checkpoint.state["interval"])
            note(run_dir, ranks, "running", progress.step)
            log_outlook(config, manifest, ranks.num_ranks)
            log.info("start      step %d%s", progress.step, f", resumed from {checkpoint.path}" if checkpoint else "")
            watchdog.progress("reading the first windows")
            feed = _feed(data, ranks, progress, stop)
            with ProgressBar(config.training.max_steps, progress.step) as bar:
                outcome = trainer.run(feed, bar, watchdog)
        if outcome is Outcome.FINISHED:
            _write_model(config, run_dir, ranks, data, tracker)
        status = "FINISHED" if outcome is Outcome.FINISHED else "SCHEDULED"
        return _end(run_dir, ranks, outcome, progress.step, stop)
    finally:
        if tracker is not None:
            tracker.close(status)


def _feed(data: RunData, ranks: Ranks, progress: Progress, stop: StopRequest) -> Feed:
    settings, batch = data.config.data, progress.batches
    loader = data.loader(progress.position, batch, ranks.rank, ranks.num_ranks, settings.loader_workers)
    return Feed(loader, ranks, data.manifest.training, settings.lanes, batch, lambda: stop.reason() is not None)


def _refuse_different_corpora(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    digests = ranks.gather(manifest.digest)
    if len(set(digests)) > 1:
        raise DataError(
            f"{folder}: ranks see different prepared corpora ({sorted(set(digests))}): is it on a shared disk?"
        ).agreed()


def _lock(run_dir: RunDir, ranks: Ranks, stop: StopRequest) -> filelock.BaseFileLock:
    """Only one job works on a run folder. Rank 0 holds the lock and looks for the stop file; every rank hears of it."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(run_dir.lock)
    held = True
    if ranks.is_first:
        try:
            lock.acquire(timeout=LOCK_SECONDS)
            stop.watch_file(run_dir.stop_file)
        except filelock.Timeout:
            held = False
    if not ranks.from_first(held):
        raise MachineError(
            f"{run_dir.path}: another job is working on this run folder (its lock is held for more than {LOCK_SECONDS} s). "
            "Stop that job, or give this run another run.name."
        )
    return lock


def _set_up_logging(run_dir: RunDir, ranks: Ranks) -> None:
    """Rank 0 writes to stderr and appends to train.log; the others write warnings only."""
    from rich.console import Console
    from rich.logging import RichHandler

    plain = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
    root = logging.getLogger("dist_transformer")
    root.setLevel(logging.INFO if ranks.is_first else logging.WARNING)
    console = (
        RichHandler(show_path=False, markup=False, console=Console(stderr=True))
        if sys.stderr.isatty()
        else logging.StreamHandler()
    )
    if not sys.stderr.isatty():
        console.setFormatter(plain)
    root.addHandler(console)
    if ranks.is_first:
        file = logging.FileHandler(run_dir.log, encoding="utf-8")
        file.setFormatter(plain)
        root.addHandler(file)


def _newest_checkpoint(run_dir: RunDir, ranks: Ranks) -> Checkpoint | None:
    """Rank 0 looks and verifies; every rank takes the same one."""
    found: Checkpoint | CheckpointError | None = None
    if ranks.is_first:
        try:
            found = checkpoints.newest_whole(run_dir)
        except CheckpointError as error:
            found = error
    found = ranks.from_first(found)
    if isinstance(found, CheckpointError):
        raise found
    return found


def _progress(data: RunData, checkpoint: Checkpoint | None) -> Progress:
    if checkpoint is None:
        return Progress(data.start())
    names = ("step", "batches", "skipped_updates", "total_target_tokens")
    return Progress(data.position_of(checkpoint), **{name: checkpoint.state[name] for name in names})


def _default_threads(ranks: Ranks) -> int:
    """What the launcher or the batch script gave each rank, else this rank's share of the cores it may use."""
    given = int(os.environ.get("OMP_NUM_THREADS") or 0)
    return given or max(1, len(os.sched_getaffinity(0)) // ranks.ranks_per_node)


def _write_model(config: Config, run_dir: RunDir, ranks: Ranks, data: RunData, tracker: Tracker | None) -> None:
    """The model folder, by rank 0; a failure is every rank's (collective)."""
    problem = None
    if ranks.is_first:
        try:
            used = write_averaged_model(config, run_dir, data.folder, data.manifest, run_dir.model)
            log.info("model      %s: average of %d checkpoints", run_dir.model, len(used))
        except (UserError, OSError) as error:
            problem = f"{run_dir.model} could not be written: {error}"
    if (problem := ranks.from_first(problem)) is not None:
        raise CheckpointError(problem)
    if tracker is not None:
        tracker.model_written(run_dir.model, {})


def _note_failure(run_dir: RunDir, ranks: Ranks, message: str) -> None:
    """The failure in train.log and run.json, as far as the disk takes it; each rank that has its own says it itself."""
    if ranks.is_first:
        log.error("end        failed: %s", message)
    with contextlib.suppress(OSError):
        note(run_dir, ranks, "failed")


def _end(run_dir: RunDir, ranks: Ranks, outcome: Outcome, step: int, stop: StopRequest) -> int:
    """Every rank passes the barrier, so that rank 0 ends last with the code that the batch script decides on."""
    reasons = [reason for reason in ranks.gather(stop.reason()) if reason]
    if outcome is Outcome.FINISHED:
        note(run_dir, ranks, "finished", step)
        log.info("end        finished at step %d", step)
        return EXIT_DONE
    note(run_dir, ranks, "stopped", step)
    log.info("end        stopped at step %d (%s); the same command goes on", step, ", ".join(sorted(set(reasons))))
    return EXIT_REQUEUE if ranks.is_first else EXIT_DONE
