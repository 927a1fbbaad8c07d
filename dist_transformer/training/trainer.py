"""One start of a run within a rank, from its newest complete checkpoint to an outcome; connects training's parts."""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dist_transformer.config import model_size
from dist_transformer.config.schema import ModelConfig, TrainingConfig
from dist_transformer.data.loader.mixture import refuse_undrawn
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.recipe import former_rules_warning, not_held_out
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import together
from dist_transformer.errors import DistTransformerError, MachineError
from dist_transformer.model.plugin import build_plugin
from dist_transformer.model.transformer import Transformer
from dist_transformer.plugins import find
from dist_transformer.run.metrics_log import newest_record
from dist_transformer.training.batch_size_finder import dry_run, find_max_tokens, largest_shapes
from dist_transformer.training.changed_settings import Changes, compare_and_report
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.checkpoint.saver import CheckpointSaver
from dist_transformer.training.checkpoint.tensor_files import validation_of
from dist_transformer.training.divergence import Diverged, LossMonitor
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.finish import RunEnd, finish
from dist_transformer.training.global_batch import GlobalBatchPrefetcher
from dist_transformer.training.guided_alignment import GuidedAlignment, open_lexicon
from dist_transformer.training.init_from import initialise
from dist_transformer.training.loop import Loop
from dist_transformer.training.memory import explaining_out_of_memory
from dist_transformer.training.metrics.console import ProgressBar, log_estimate
from dist_transformer.training.metrics.logger import MetricsLogger
from dist_transformer.training.metrics.mfu import mfu_of, peak_of
from dist_transformer.training.metrics.system_metrics import NodeSampler
from dist_transformer.training.profiler import profiling
from dist_transformer.training.run import Run
from dist_transformer.training.run_data import RunData
from dist_transformer.training.run_log import RunLog, note, open_run_log
from dist_transformer.training.silent_errors import begin_checks, machine_name
from dist_transformer.training.train_state import TrainState
from dist_transformer.training.validation.runner import Validator
from dist_transformer.training.validation.schedule import EarlyStopping, ValidationSchedule
from dist_transformer.training.validation.translation import dry_run_of_validation, open_validator

log = logging.getLogger(__name__)


def train(run: Run) -> tuple[bool, int]:
    """Trains from the newest complete checkpoint until the end of the run, a stop or a divergence (collective). Raises
    Diverged: on every rank; the checkpoint in flight is complete, and the records are closed.

    Returns:
        True if the run has finished, False if it was stopped; and the last step.
    """
    checkpoint = run_on_rank_zero(run.ranks, lambda: _newest(run), run.doing("checking the checkpoints"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(run.run_dir.compiled))  # on GPUs
    run = settle_config(run, checkpoint)
    objective = _initial_objective(run)
    origin = _load_initial_weights(run, objective, checkpoint)
    if run.config.model.positions == "marian" and run.config.model.plugin is None:
        objective.model.keep_start_at_zero(run.data.manifest.bos_id)
    run_on_rank_zero(run.ranks, lambda: _warn_of_held_out(run, checkpoint), run.doing("looking at what was held out"))
    state = together(run.ranks, partial(_train_state, run.data, checkpoint))
    engine = _engine(run, objective, checkpoint)
    changes = compare_and_report(run, checkpoint)
    run_log = _open_run_log(run, state, origin | changes.tags())
    end = RunEnd(run, run_log.tracker if run_log else None)
    try:
        is_finished, early_stop = _loop(run, engine, checkpoint, changes, state, run_log)
        is_finished = is_finished and finish(run, end, state.step, early_stop)
        end.close("FINISHED" if is_finished else "SCHEDULED")
        return is_finished, state.step
    except Diverged:
        engine.close()
        end.close("FAILED" if run.config.divergence.policy == "stop" else "SCHEDULED")
        raise
    finally:
        end.close_alone("FAILED")


def _newest(run: Run) -> Checkpoint | None:
    """Returns the checkpoint to resume from; without one, nothing that a start before made of its corpus is used."""
    if (checkpoint := checkpoints.newest_complete(run.run_dir, run.run_id)) is None:
        run.run_dir.lexicon.unlink(missing_ok=True)
    return checkpoint


def settle_config(run: Run, checkpoint: Checkpoint | None) -> Run:
    """Resolves settings that depend on this start's ranks, checkpoint and divergences, once and for all (collective).

    `data.max_tokens: auto` becomes the number of the checkpoint, and without one is found.
    """
    training = run.config.training
    if run.recovery.switch_to_bf16 and training.precision == "fp16":
        training = training.model_copy(update={"precision": "bf16"})
    run = replace(run, training=model_size.effective_training(training, run.ranks.num_ranks))
    config = run.config
    if config.data.max_tokens == "auto":
        data = config.data.model_copy(update={"max_tokens": _token_budget(run, checkpoint)})
        config = config.model_copy(update={"data": data})
    return replace(run, config=config, data=replace(run.data, config=config))


def build_objective(model: ModelConfig, training: TrainingConfig, manifest: Manifest) -> Objective:
    """Builds the model with its loss, newly initialised from torch's random state."""
    sizes = manifest.source_vocabulary, manifest.target_vocabulary, manifest.pad_id
    if model.plugin is not None:
        transformer: Transformer = build_plugin(find("model.plugin", model.plugin), model, *sizes)
    else:
        transformer = Transformer(model, *sizes, activation_checkpointing=training.activation_checkpointing)
    return Objective(transformer, training.label_smoothing, training.precision)


def _initial_objective(run: Run) -> Objective:
    """(Collective.)"""
    torch.manual_seed(run.config.run.seed)
    building = partial(build_objective, run.config.model, run.training, run.data.manifest)
    objective = together(run.ranks, building)
    if weight := run.training.guided_alignment:
        objective.second_loss = GuidedAlignment(objective.model, open_lexicon(run), weight).loss
    return objective


def _token_budget(run: Run, checkpoint: Checkpoint | None) -> int:
    """Returns the budget of the checkpoint, else searches (collective)."""
    if checkpoint is not None:
        return int(checkpoint.state["recipe"]["data.max_tokens"])
    ranks, training, manifest = run.ranks, run.training, run.data.manifest
    doing = run.doing("looking for the largest data.max_tokens")
    doing()
    objective = _initial_objective(run)
    parameters = model_size.count_by_part(run.config.model, manifest.source_vocabulary, manifest.target_vocabulary)
    held = model_size.state_bytes(parameters, training, ranks.num_ranks)
    if ranks.device.type == "cpu":
        held += model_size.offloaded_bytes(parameters.total, training, ranks.num_ranks)
        held += model_size.staging_bytes(parameters.total, training, ranks.num_ranks)
    return find_max_tokens(objective, held, run.config.data, ranks, training, doing)


def _load_initial_weights(run: Run, objective: Objective, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Loads `training.init_from` at the first start, and returns MLflow's tags for it (collective)."""
    if run.config.training.init_from is None:
        return {}
    if checkpoint is not None:
        log.info("init_from  not looked at: the run resumes from step %d", checkpoint.step)
        return {}
    return initialise(run, objective.model)


def _train_state(data: RunData, checkpoint: Checkpoint | None) -> TrainState:
    if checkpoint is None:
        refuse_undrawn(data.config.data.mixture, data.planner)
        return TrainState(data.start())
    names = ("step", "batches", "skipped_updates", "total_target_tokens")
    return TrainState(data.position_of(checkpoint), **{name: checkpoint.state[name] for name in names})


def _engine(run: Run, objective: Objective, checkpoint: Checkpoint | None) -> Engine:
    """Builds the engine with the state of the checkpoint (collective)."""
    run.watchdog.progress("building the engine")
    with explaining_out_of_memory("the weights, gradients and optimizer state", run.ranks.device):
        engine = Engine(objective, run.training, run.config.optimizer, run.ranks)
    if checkpoint is not None:
        checkpoints.load(checkpoint, engine, run.doing(f"loading {checkpoint.path.name}"))
        _warn_of_other_threads(run, checkpoint)
    return engine


def _warn_of_held_out(run: Run, checkpoint: Checkpoint | None) -> None:
    if checkpoint is None and (warning := former_rules_warning(run.data.folder, run.data.manifest.recipe)):
        log.warning("data       %s", warning)
    if names := ", ".join(f"data.{name}" for name in not_held_out(run.config.data, run.data.manifest.recipe)):
        log.warning("data       %s: not held out of the text that was prepared before: may be trained on", names)


def _warn_of_other_threads(run: Run, checkpoint: Checkpoint) -> None:
    now = torch.get_num_threads()
    then = checkpoint.state.get("num_threads", now)
    same_ranks = checkpoint.state.get("num_ranks") == run.ranks.num_ranks and run.training.precision == "fp32"
    is_exact = run.ranks.device.type == "cpu" and (run.training.same_bits or same_ranks)
    if is_exact and then != now:
        log.warning(
            "threads    %s was computed with %d threads a rank, this start has %d, which rounds otherwise: start with "
            "OMP_NUM_THREADS=%d (in a job by slurm.environment) for the same bits", checkpoint.path.name, then, now, then,
        )  # fmt: skip


def _open_run_log(run: Run, state: TrainState, tags: dict[str, str]) -> RunLog | None:
    """Opens the records of this start on rank 0; dropping those beyond `state` may take long (collective)."""
    opened: list[RunLog] = []  # not sent to the other ranks
    doing = run.doing("cutting back the records of an earlier start")
    run_on_rank_zero(run.ranks, lambda: opened.append(open_run_log(run, state, tags)), doing)
    return opened[0] if opened else None


def _loop(
    run: Run, engine: Engine, checkpoint: Checkpoint | None, changes: Changes, state: TrainState, run_log: RunLog | None
) -> tuple[bool, str]:
    """Builds the parts of the loop and runs it (collective). Returns whether it reached the end of training, and the
    reason of an early stop."""
    config, ranks, data, watchdog = run.config, run.ranks, run.data, run.watchdog
    path, doing = run.run_dir.metrics, run.doing("reading the earlier records")
    log_line, validation_line = run_on_rank_zero(ranks, lambda: _newest_records(run, checkpoint, changes), doing)
    every = (changes.former or changes.settings)["training"]["log_every_steps"]
    if run_log and log_line["step"] < state.step - every:
        log.warning("records    %s: those after step %d are lost: a power loss?", path, log_line["step"])
    validator = open_validator(run, engine)
    stopping = EarlyStopping(config.validation, changes.early_stopping(checkpoint))
    sampler = NodeSampler(ranks)
    peak, is_published = peak_of(ranks.device, run.training.precision)
    peaks = float(ranks.all_reduce_sum(torch.tensor([peak], dtype=torch.float64)))
    mfu = partial(mfu_of, config.model, data.manifest.target_vocabulary, peaks)
    bar = ProgressBar(config.training.max_steps, state.step, config.checkpoints.every_steps, run.terminal.quiet)
    metrics = MetricsLogger(ranks, engine, sampler, run_log, int(log_line["step"]), bar, mfu)
    validation = ValidationSchedule(run, validator, stopping, run_log, validation_line, bar, metrics.validated)
    writer = AsyncWriter(run.run_dir, ranks, watchdog.progress)
    flush, record = run_log.flush if run_log else lambda: None, partial(_record, run, run_log)
    saver = CheckpointSaver(writer, engine, flush, record, metrics.stood_still)
    settings, doing = config.data, run.doing("reading windows")
    loader = data.loader(state.position, state.batches, ranks.rank, ranks.num_ranks, settings.loader_workers, doing)
    batches = GlobalBatchPrefetcher(loader, ranks, run.data.manifest.training, settings.lanes, state.batches)
    identity = {
        "recipe": data.recipe(),
        "libraries": data.libraries,
        "run_id": run.run_id,
        "settings": changes.settings,
    }
    monitor = LossMonitor(changes.loss_monitor(checkpoint))
    errors = begin_checks(run, engine)
    loop = Loop(run, engine, batches, state, metrics, validation, saver, monitor, errors, bar, identity)
    if checkpoint is not None:
        loop.restore(checkpoint.state)
    note(run.run_dir, ranks, "running", state.step)
    log_estimate(config, run.training, data.manifest, ranks.num_ranks)
    source = "published" if is_published else "measured"
    log.info("device     %s", machine_name(ranks.device))
    log.info("peak       %.4g TFLOP/s a rank, %s; mfu is the share of it", peak / 1e12, source)
    log.info("start      step %d%s", state.step, f", resumed from {checkpoint.path}" if checkpoint else "")
    _take_memory(run, engine, writer, validator)
    watchdog.progress("reading the first windows")
    gc.collect()
    gc.freeze()  # what is there now stays: a collection would look through all of it, on each rank at another step
    calls = (
        (bar, "show", "tracking"), (validation, "validate", "validation"),
        (writer, "begin", "checkpoint"), (writer, "finish", "checkpoint"),
    )  # fmt: skip
    written = run_log.tracker.profile_written if run_log and run_log.tracker else None
    profile = profiling(run, engine, batches, metrics, calls, written) if run.terminal.profile else nullcontext()
    with bar.progress, sampler, _ending_save(run, saver, state), profile:
        is_finished = loop.run()
    early_stop = validation.early_stopping.reason() or "" if is_finished else ""
    if early_stop:
        log.info("early stop %s", early_stop)
    return is_finished, early_stop


def _newest_records(run: Run, checkpoint: Checkpoint | None, changes: Changes) -> list[dict[str, Any]]:
    """Returns the newest records of training and of validation; of one that was measured otherwise, its step alone."""
    train, validation = (newest_record(run.run_dir.metrics, event) for event in ("train", "validation"))
    if checkpoint is not None and changes.is_other_metric:
        settings = validation_of(checkpoint.path)[1] or changes.former  # of a later start, if one made up for it
        changes = replace(changes, former=settings)
    return [train, {"step": validation["step"]} if changes.is_other_metric else validation]


def _record(run: Run, run_log: RunLog | None, *saved: Any) -> None:
    """Records a saved checkpoint, and deletes old ones, each of which is progress however slow the disk is (collective)."""
    parts = run_log.checkpoint_saved(*saved) if run_log else iter(())
    while run_on_rank_zero(run.ranks, lambda: next(parts, None), run.doing("recording the checkpoint")):
        run.watchdog.progress("deleting old checkpoints")


def _take_memory(run: Run, engine: Engine, writer: AsyncWriter, validator: Validator) -> None:
    """Allocates the memory that training will need, so that a run with too little ends before its first step."""
    config, ranks, progress = run.config, run.ranks, run.watchdog.progress
    with explaining_out_of_memory("the copy of the state for checkpoints", ranks.device):
        writer.reserve(engine)
    at_once = model_size.lanes_of_pass(config.data.lanes, run.training, ranks.num_ranks)
    dry_run(engine, largest_shapes(config.data, at_once), ranks, run.data.manifest.eos_id, progress)
    if ranks.device.type == "cuda":  # on CPUs a search takes long, and memory can mostly be swapped
        dry_run_of_validation(run, validator)


@contextmanager
def _ending_save(run: Run, saver: CheckpointSaver, state: TrainState) -> Iterator[None]:
    """Completes the checkpoint in flight after an error that all ranks agree on; names a step that ran out of memory."""
    try:
        yield
    except (Diverged, DistTransformerError) as error:
        if isinstance(error, Diverged) or error.is_agreed:
            saver.finish()
        raise
    except (RuntimeError, MemoryError):
        where = f"step {state.step + 1} of rank {run.ranks.rank}"
        # A retry may succeed, as earlier steps did.
        with explaining_out_of_memory(where, run.ranks.device, MachineError):
            raise
