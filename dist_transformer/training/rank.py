"""One rank of a training run, from joining the group to its exit code: the lock, the log, divergences, failures."""

import contextlib
import errno
import gc
import logging
import os
import platform
import resource
import sys
import traceback
from functools import partial

import torch

from dist_transformer.config.credentials import without_secrets
from dist_transformer.config.schema import Config
from dist_transformer.data.prepare.progress import prepare_for_training
from dist_transformer.distributed import causes, group
from dist_transformer.distributed.group import Ranks, has_gpus
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import together
from dist_transformer.errors import EXIT_DONE, EXIT_REQUEUE, DataError, MachineError, UserError, say
from dist_transformer.interop.model_folder import MODEL_FOLDER, is_model_folder
from dist_transformer.processes.launching import threads_per_rank
from dist_transformer.processes.stop_request import StopRequest, leave
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import RunLock
from dist_transformer.run.metrics_log import add_event
from dist_transformer.run.outputs import check_output, check_run_folder, is_misplaced, writing
from dist_transformer.run.records import read_record_patiently
from dist_transformer.tracking.final_status import status_said
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.divergence import Diverged, Recovery, first_bad_step, read_recovery, recover
from dist_transformer.training.metrics.console import Terminal
from dist_transformer.training.precision import bf16_warning, resolve_precision
from dist_transformer.training.run import Run
from dist_transformer.training.run_data import RunData, open_run_data, row_groups_warning
from dist_transformer.training.run_log import add_to_history, note
from dist_transformer.training.run_log import run_id as run_id_of
from dist_transformer.training.trainer import train
from dist_transformer.training.watchdog import Watchdog

log = logging.getLogger(__name__)


def train_rank(config: Config, run_dir: RunDir, stop: StopRequest, terminal: Terminal) -> int:
    """Trains as the rank that the environment names; alone without RANK. Returns the exit code. Raises UserError: on
    every rank; the process must then leave without touching its group."""
    _allow_open_files()
    config, precision = resolve_precision(config, has_gpus())  # refused by this rank alone, if its GPU alone is lost
    folder, manifest = prepare_for_training(config, stop)
    ranks = group.join(config.training.hang_seconds)
    torch.set_num_threads(_default_threads(ranks))
    if config.training.max_hours is not None:
        stop.end_after(3600 * config.training.max_hours)
    lock = _lock(run_dir, ranks, stop)  # before anything is written into the run folder: another job may use it
    try:
        digests = sorted(set(ranks.all_gather_object(manifest.digest)))
        if len(digests) > 1:
            problem = f"{folder}: ranks see different prepared corpora ({digests}): is it on a shared disk?"
            raise DataError(problem).agreed()
        _set_up_logging(run_dir, ranks, terminal)
        if precision:
            log.info("precision  %s", precision)
        if ranks.is_rank_zero and (warning := bf16_warning(config, ranks.device)):
            log.warning("precision  %s", warning)
        data = together(ranks, partial(open_run_data, config, folder, manifest))
        if ranks.is_rank_zero and (warning := row_groups_warning(config, manifest)):
            log.warning("data       %s", warning)
        code = _train(config, run_dir, ranks, data, stop, terminal)
    except UserError as error:
        _note_failure(run_dir, ranks, str(error), is_refusal=True, is_told=error.is_agreed)
        raise
    except OSError as error:
        message = f"{error}. Is the disk of {run_dir.path} or of the prepared corpus full, or gone? Start again when it is back"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            message = f"{error}: raise the limit on open files (ulimit -n), and start again"
        _note_failure(run_dir, ranks, message)
        # A path that was writable at the start and is not any more is on a disk that failed: no error of the user.
        is_theirs = is_misplaced(error) and error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
        raise (UserError if is_theirs else MachineError)(message) from error
    except Exception as error:  # noqa: BLE001  (the last handler: reports and leaves, so that the other ranks can)
        cause = causes.explain(error)  # short if this rank only lost another one, whose message must stay visible
        said = without_secrets(traceback.format_exc()) if cause is None else f"{cause} ({ranks.last.text()})"
        say(f"{_name_of(ranks)} failed: {said}")
        _note_failure(run_dir, ranks, said, said.strip().splitlines()[-1], is_told=causes.is_of_another(cause))
        leave(causes.exit_code_of(cause))
    lock.release()
    group.leave()
    return code


def _allow_open_files() -> None:
    """Raises the limit on open files, often 1024, as far as it may be, to 65,536: rank 0 has four for each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2**16)), hard))


def _train(config: Config, run_dir: RunDir, ranks: Ranks, data: RunData, stop: StopRequest, terminal: Terminal) -> int:
    """Trains until the end or a stop; after a divergence it resumes from the newest good checkpoint by the policy."""
    run_id, recovery = run_on_rank_zero(ranks, lambda: (run_id_of(run_dir), read_recovery(run_dir)), lambda: None)
    if recovery.learning_rate_factor != 1.0 or recovery.switch_to_bf16:
        log.warning("divergence %s asks for %s", run_dir.divergence, recovery.text())
    with Watchdog(config.training.hang_seconds, ranks) as watchdog:
        while True:
            run = Run(config, config.training, run_dir, ranks, data, stop, run_id, recovery, watchdog, terminal)
            try:
                return _end(run, *train(run))
            except Diverged as error:
                diverged = Diverged(error.reason, error.since_step)  # the traceback of `error` holds the engine
            gc.unfreeze()
            gc.collect()  # frees the engine that diverged before the next one is built
            doing = run.doing("going back after a divergence")
            recovery = run_on_rank_zero(ranks, partial(_recover, run, diverged), doing)


def _recover(run: Run, diverged: Diverged) -> Recovery:
    """Sets aside the checkpoints of steps that diverged, and decides how the run continues (rank 0)."""
    add_to_history(run.run_dir, "end", diverged.since_step, {"state": "diverged", "reason": diverged.reason})
    oldest_step = min(map(checkpoints.step_of, checkpoints.saved(run.run_dir)), default=0)
    checkpoints.set_aside_from(run.run_dir, first_bad_step(run.run_dir, diverged, oldest_step))
    good = checkpoints.saved(run.run_dir)[-1:]
    good_step = checkpoints.step_of(good[0]) if good else 0
    return recover(run.run_dir, run.config.divergence, run.config.training.precision, diverged, good_step)


def _lock(run_dir: RunDir, ranks: Ranks, stop: StopRequest) -> RunLock:
    """Locks the run folder for this job: rank 0 holds the lock and watches the stop file; all ranks raise a refusal."""
    lock = RunLock(run_dir)

    def take() -> None:  # it may wait for longer than training.hang_seconds
        with writing(run_dir.path):
            run_dir.path.mkdir(parents=True, exist_ok=True)
            check_run_folder(run_dir)
            check_output(run_dir.model, MODEL_FOLDER, is_model_folder)  # now, and not only after training
            lock.acquire()
        stop.watch_file(run_dir.stop_file)

    run_on_rank_zero(ranks, take, lambda: None)
    return lock


def _set_up_logging(run_dir: RunDir, ranks: Ranks, terminal: Terminal) -> None:
    """Sets up the log: rank 0 writes to stderr, unless quiet, and appends to train.log; others write only warnings."""
    from rich.console import Console
    from rich.logging import RichHandler

    plain = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
    root = logging.getLogger("dist_transformer")
    root.setLevel(logging.INFO if ranks.is_rank_zero else logging.WARNING)
    console: logging.Handler = logging.StreamHandler()
    console.setFormatter(plain)
    if sys.stderr.isatty():
        console = RichHandler(show_path=False, markup=False, console=Console(stderr=True))
    console.setLevel(logging.WARNING if terminal.quiet else logging.INFO)
    console.addFilter(lambda record: not getattr(record, "is_said_elsewhere", False))
    root.addHandler(console)
    if ranks.is_rank_zero:
        file = _LogFile(run_dir.log, encoding="utf-8")
        file.setFormatter(plain)
        root.addHandler(file)


class _LogFile(logging.FileHandler):
    """train.log. Lines that its disk does not take are on the console alone."""

    is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports the first error on standard error, instead of a traceback for each line; opens the file anew for the next
        line if a network disk that failed over does not know the old one any more."""
        if not self.is_reported:
            self.is_reported = True
            say(f"{self.baseFilename}: {sys.exc_info()[1]}; lines of the log are lost there")
        if getattr(sys.exc_info()[1], "errno", None) == errno.ESTALE:
            with contextlib.suppress(OSError):
                self.stream = self._open()


def _default_threads(ranks: Ranks) -> int:
    """Returns the threads set by the launcher or the batch script, else this rank's share of the available cores."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": of nested regions, too
    return (int(given) if given.isdecimal() else 0) or threads_per_rank(ranks.ranks_per_node)


def _name_of(ranks: Ranks) -> str:
    return f"rank {ranks.rank} of {ranks.num_ranks} on {platform.node()}"


def _note_failure(
    run_dir: RunDir, ranks: Ranks, message: str, reason: str = "", is_refusal: bool = False, is_told: bool = False
) -> None:
    """Records a failure in train.log and run.json, if the disk takes it.

    `reason`: the message in one line. `is_refusal`: of the start, after which a run that has finished is still finished.
    `is_told`: another rank records it.
    """
    reason = reason or " ".join(message.split())
    if ranks.is_rank_zero:
        log.error("end        failed: %s", message, extra={"is_said_elsewhere": True})
    elif not is_told:
        with contextlib.suppress(OSError), run_dir.log.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{_name_of(ranks)} failed: {without_secrets(message)}\n")
    with contextlib.suppress(OSError, MachineError):
        # Said by an earlier start, or before a rollback was refused.
        if ranks.is_rank_zero and status_said(run_dir) == "SCHEDULED":
            add_event(run_dir.tracking_events, "status", {"status": "FAILED"})
        before = read_record_patiently(run_dir.state)
        if not is_refusal or before.get("state") != "finished":
            note(run_dir, ranks, "failed", reason=reason)
        elif ranks.is_rank_zero:
            add_to_history(run_dir, "failed start", before.get("step", 0), {"reason": without_secrets(reason)})


def _end(run: Run, is_finished: bool, step: int) -> int:
    """Records the end and returns the exit code (collective: rank 0, whose code the batch script reads, ends last)."""
    run_dir, ranks, stop = run.run_dir, run.ranks, run.stop
    reasons = [reason for reason in ranks.all_gather_object(stop.reason()) if reason]
    if is_finished:
        log.info("end        finished at step %d", step)
        return EXIT_DONE
    reason = ", ".join(sorted(set(reasons)))
    note(run_dir, ranks, "stopped", step, reason)
    log.info("end        stopped at step %d (%s); the same command resumes it", step, reason)
    return EXIT_REQUEUE if ranks.is_rank_zero else EXIT_DONE
