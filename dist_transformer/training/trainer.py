"""One start of a run within a rank: from its newest whole checkpoint to an outcome. Where the parts of training meet."""

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from dist_transformer.config.loading import load_config
from dist_transformer.config.model_size import offloaded_bytes, snapshot_bytes, state_bytes, with_effective_zero_stage
from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import Stopped
from dist_transformer.errors import CheckpointError, DistTransformerError, MachineError, UserError
from dist_transformer.model.transformer import Transformer
from dist_transformer.processes.stop_request import StopRequest
from dist_transformer.run.folder import RunDir
from dist_transformer.tracking.tracker import Tracker
from dist_transformer.training.batch_size_finder import dry_run, find_max_tokens, largest_shapes
from dist_transformer.training.changed_settings import Changes, compare_and_tell
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.checkpoint.final_model import write_final_model
from dist_transformer.training.crash import write_crash
from dist_transformer.training.divergence import Diverged, LossMonitor, Recovery
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.engine.schedule import learning_rate
from dist_transformer.training.finish import RunEnd
from dist_transformer.training.global_batch import GlobalBatchPrefetcher
from dist_transformer.training.init_from import initialise
from dist_transformer.training.loop import Outcome, Trainer
from dist_transformer.training.memory import telling_out_of_memory
from dist_transformer.training.metrics.console import ProgressBar, Terminal, log_outlook
from dist_transformer.training.metrics.logger import Reporter
from dist_transformer.training.metrics.mfu import Mfu, Peak, flops_of_batches, peak_of
from dist_transformer.training.metrics.system_metrics import NodeSampler
from dist_transformer.training.profiling.profiler import Job, Watched, profiling
from dist_transformer.training.run_data import RunData
from dist_transformer.training.run_log import newest_records, note, open_records
from dist_transformer.training.train_state import RunLog, TrainState
from dist_transformer.training.validation.early_stopping import EarlyStopping
from dist_transformer.training.validation.translation import dry_run_of_validation, open_validator
from dist_transformer.training.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a start of a run within this process is given."""

    config: Config
    run_dir: RunDir
    ranks: Ranks
    data: RunData
    stop: StopRequest
    run_id: str
    recovery: Recovery
    watchdog: Watchdog
    terminal: Terminal

    @property
    def manifest(self) -> Manifest:
        return self.data.manifest

    def wants_stop(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.stop.reason() is not None

    def doing(self, what: str) -> Callable[[], None]:
        """Tells the watchdog that this moves."""
        return lambda: self.watchdog.progress(what)


def train(run: Run) -> tuple[Outcome, int]:
    """Goes on from the newest whole checkpoint until the end, a stop, or a divergence (collective); the last step.

    Raises:
        Diverged: on every rank; the checkpoint in flight is written, and the records are closed.
    """
    given, ranks = run.config, run.ranks
    checkpoint = run_on_rank_zero(
        ranks, lambda: checkpoints.newest_whole(run.run_dir, run.run_id), run.doing("checking the checkpoints")
    )
    run = replace(run, config=with_effective_zero_stage(_with_precision(run), ranks.num_ranks))
    torch.manual_seed(run.config.run.seed)
    objective = objective_of(run.config, run.manifest)
    origin = _initial_weights(run, objective, checkpoint)
    config = _with_token_budget(run, checkpoint, objective)
    run = replace(run, config=config, data=replace(run.data, config=config))
    progress = _progress(run.data, checkpoint)
    engine = _engine(run, objective, checkpoint)
    kept = config.model_copy(update={"training": given.training})  # as given, not as a divergence left it
    changes = compare_and_tell(kept, run.data.folder, run.run_dir, checkpoint, ranks)
    journal, tracker = _records(replace(run, config=kept), progress, origin | changes.tags())
    end = RunEnd(config, run.run_dir, ranks, run.watchdog, tracker)
    try:
        outcome, early_stop = _train(run, engine, checkpoint, changes, progress, journal)
        with suppress(Stopped):
            if outcome is Outcome.FINISHED:
                outcome = Outcome.STOPPED  # as long as there is something to do
                _write_model(run, tracker)
                note(run.run_dir, ranks, "finished", progress.step, early_stop)
                end.draw_report(run.wants_stop)
                outcome = Outcome.FINISHED
        end.close("FINISHED" if outcome is Outcome.FINISHED else "SCHEDULED")
        return outcome, progress.step
    except Diverged:
        engine.close()
        end.close("FAILED" if config.divergence.policy == "stop" else "SCHEDULED")
        raise
    finally:
        end.close_alone("FAILED")


def _records(run: Run, progress: TrainState, origin: dict[str, str]) -> tuple[RunLog | None, Tracker | None]:
    """Those of this start, on rank 0; cutting back what an earlier one wrote may take long (collective)."""
    opened: list[tuple[RunLog, Tracker | None]] = []  # it stays on rank 0

    def open_them() -> None:
        echo = sys.stdout if run.terminal.as_json else None
        opened.append(
            open_records(run.config, run.run_dir, run.ranks, run.data.folder, run.manifest, progress, origin, echo)
        )

    run_on_rank_zero(run.ranks, open_them, run.doing("cutting back the records of an earlier start"))
    return opened[0] if opened else (None, None)


def _initial_weights(run: Run, objective: Objective, checkpoint: Checkpoint | None) -> dict[str, str]:
    """What MLflow is told of `training.init_from`; nothing without it (collective)."""
    if run.config.training.init_from is None:
        return {}
    if checkpoint is not None:
        log.info("init_from  not looked at: the run goes on from step %d", checkpoint.step)
        return {}
    doing = run.doing("reading the weights of training.init_from")
    doing()
    return initialise(objective.model, run.config, run.manifest, run.ranks, doing)


def _engine(run: Run, objective: Objective, checkpoint: Checkpoint | None) -> Engine:
    """The engine with the state of the checkpoint (collective)."""
    run.watchdog.progress("building the engine")
    with telling_out_of_memory("the weights, gradients and optimizer state", run.ranks.device):
        engine = Engine(objective, run.config.training, run.config.optimizer, run.ranks)
    if checkpoint is not None:
        checkpoints.load(checkpoint, engine, run.doing(f"loading {checkpoint.path.name}"))
    return engine


def _train(
    run: Run, engine: Engine, checkpoint: Checkpoint | None, changes: Changes, progress: TrainState, journal: RunLog | None,
) -> tuple[Outcome, str]:  # fmt: skip
    """How it ended, and why before the last step; "": it did not."""
    config, ranks, data, watchdog = run.config, run.ranks, run.data, run.watchdog
    recorded = run_on_rank_zero(ranks, lambda: newest_records(run.run_dir), run.doing("reading the earlier records"))
    validator = open_validator(config, data, engine, ranks, watchdog.progress, run.wants_stop)
    stopping = EarlyStopping(config.validation, changes.early_stopping(checkpoint))
    sampler = NodeSampler(ranks) if config.tracking.system_metrics else None
    peak = peak_of(ranks.device, config.training.precision, run.terminal.profile)
    mfu = Mfu(config.model, data.manifest.target_vocabulary, _sum(ranks, peak.flops_per_second)).of
    reporter = Reporter(config, ranks, engine, validator, stopping, sampler, journal, recorded, mfu)
    monitor = LossMonitor(changes.loss_monitor(checkpoint))
    saver = AsyncWriter(run.run_dir, ranks, watchdog.progress)
    factor = run.recovery.learning_rate_factor
    about = {"recipe": data.recipe(), "libraries": data.libraries, "run_id": run.run_id, "settings": changes.settings}
    trainer = Trainer(
        config, ranks, engine, saver, reporter, monitor, progress, about,
        lambda step: factor * learning_rate(config, step),
    )  # fmt: skip
    if checkpoint is not None:
        trainer.restore(checkpoint.state)
    note(run.run_dir, ranks, "running", progress.step)
    log_outlook(config, data.manifest, ranks.num_ranks)
    log.info("peak       %s; mfu is the share of it", peak.text())
    log.info("start      step %d%s", progress.step, f", resumed from {checkpoint.path}" if checkpoint else "")
    with telling_out_of_memory("the copy of the state for checkpoints", ranks.device):
        saver.reserve(engine)
    dry_run(engine, largest_shapes(config.data), ranks, data.manifest.eos_id, watchdog.progress)
    if ranks.device.type == "cuda":  # on CPUs a search takes long, and there is mostly memory to swap
        dry_run_of_validation(validator, config, data, ranks, watchdog.progress)
    watchdog.progress("reading the first windows")
    every_steps, quiet = config.checkpoints.every_steps, run.terminal.quiet
    with (
        ProgressBar(config.training.max_steps, progress.step, every_steps, quiet) as bar,
        sampler or nullcontext(),
        _crash_records(run, trainer),
    ):
        prefetcher = _prefetcher(run, trainer)
        with _profile(run, peak, journal, Watched(engine, prefetcher, reporter, saver, bar)):
            outcome = trainer.run(prefetcher, bar, watchdog)
    early_stop = stopping.reason() or "" if outcome is Outcome.FINISHED else ""
    if early_stop:
        log.info("early stop %s", early_stop)
    return outcome, early_stop


def _profile(run: Run, peak: Peak, journal: RunLog | None, watched: Watched) -> AbstractContextManager[None]:
    if not run.terminal.profile:
        return nullcontext()
    told = journal.profile_written if journal else None
    config, vocabulary = run.config, run.manifest.target_vocabulary
    job = Job(run.ranks, run.run_dir.profile, config.training.precision, peak, run.watchdog.progress, told)
    return profiling(watched, job, partial(flops_of_batches, config.model, vocabulary))


def _sum(ranks: Ranks, value: float) -> float:
    """Over the ranks (collective)."""
    return float(ranks.all_reduce_sum(torch.tensor([value], dtype=torch.float64)))


@contextmanager
def _crash_records(run: Run, trainer: Trainer) -> Iterator[None]:
    """What all ranks agree on lets the checkpoint in flight be ended; for all else it is written down what was done."""
    try:
        yield
    except (Diverged, DistTransformerError) as error:
        if isinstance(error, Diverged) or error.is_agreed:
            trainer.end_save()
        raise
    except OSError:
        raise  # of the machine; there is nothing to replay
    except Exception as error:
        write_crash(run.run_dir, run.ranks, error, run.config, trainer.progress, trainer.current_batch)
        where = f"step {trainer.progress.step + 1} of rank {run.ranks.rank}"
        with telling_out_of_memory(where, run.ranks.device, MachineError):  # it went well before: again it may
            raise


def objective_of(config: Config, manifest: Manifest) -> Objective:
    """The model with its loss, newly initialised from torch's random state."""
    training = config.training
    model = Transformer(
        config.model,
        manifest.source_vocabulary,
        manifest.target_vocabulary,
        manifest.pad_id,
        activation_checkpointing=training.activation_checkpointing,
    )
    return Objective(model, training.label_smoothing, training.precision)


def _prefetcher(run: Run, trainer: Trainer) -> GlobalBatchPrefetcher:
    settings, ranks, progress = run.config.data, run.ranks, trainer.progress
    batch = progress.batches
    loader = run.data.loader(
        progress.position, batch, ranks.rank, ranks.num_ranks, settings.loader_workers, run.doing("reading windows")
    )
    return GlobalBatchPrefetcher(
        loader, ranks, run.manifest.training, settings.lanes, batch,
        lambda: trainer.news(run.wants_stop()),
    )  # fmt: skip


def _with_precision(run: Run) -> Config:
    config = run.config
    if not run.recovery.switch_to_bf16 or config.training.precision != "fp16":
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"precision": "bf16"})})


def _with_token_budget(run: Run, checkpoint: Checkpoint | None, objective: Objective) -> Config:
    """`data.max_tokens: auto` becomes a number at the first start, and stays that number (collective)."""
    config, ranks = run.config, run.ranks
    if config.data.max_tokens != "auto":
        return config
    found = ranks.broadcast_object(_budget_found_before(run.run_dir) if ranks.is_rank_zero else None)
    if checkpoint is not None:
        found = checkpoint.state["recipe"]["data.max_tokens"]
    if found is None:
        doing = run.doing("looking for the largest data.max_tokens")
        doing()
        parameters = sum(parameter.numel() for parameter in objective.parameters())
        held = state_bytes(parameters, config.training, ranks.num_ranks)
        if ranks.device.type == "cpu":
            held += offloaded_bytes(parameters, config.training, ranks.num_ranks)
            held += snapshot_bytes(parameters, config.training, ranks.num_ranks)
        found = find_max_tokens(objective, held, config.data, ranks, config.training.precision, doing)
    return config.model_copy(update={"data": config.data.model_copy(update={"max_tokens": found})})


def _budget_found_before(run_dir: RunDir) -> int | None:
    """By a start that did not come to its first checkpoint."""
    if not run_dir.config.is_file():
        return None
    before = load_config(run_dir.config, check_files=False).data.max_tokens
    return None if before == "auto" else before


def _progress(data: RunData, checkpoint: Checkpoint | None) -> TrainState:
    if checkpoint is None:
        return TrainState(data.start())
    names = ("step", "batches", "skipped_updates", "total_target_tokens")
    return TrainState(data.position_of(checkpoint), **{name: checkpoint.state[name] for name in names})


def _write_model(run: Run, tracker: Tracker | None) -> None:
    """The model folder, by rank 0; a failure or a stop is every rank's (collective)."""
    run_dir = run.run_dir

    def write() -> str:
        for left_over in run_dir.path.glob(
            f".{run_dir.model.name}.*.tmp"
        ):  # of a start that was stopped or killed here
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            return write_final_model(run.config, run_dir, run.data.folder, run.manifest, run_dir.model)
        except MachineError as error:
            raise MachineError(f"{run_dir.model} could not be written: {error}") from error
        except (UserError, OSError) as error:
            raise CheckpointError(f"{run_dir.model} could not be written: {error}") from error

    made_of = run_on_rank_zero(run.ranks, write, run.doing("averaging the checkpoints"), wants_stop=run.wants_stop)
    log.info("model      %s: %s", run_dir.model, made_of)
    if tracker is not None:
        tracker.model_written(run_dir.model, {})
