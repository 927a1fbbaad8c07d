"""Commands of the batch script: find the run folder and, after an attempt, decide whether the job is requeued.

    python -m dist_transformer.cluster.requeue begin JOB ATTEMPT CONFIG_OR_RUN_FOLDER [section.key=value ...]
    python -m dist_transformer.cluster.requeue end RUN_FOLDER JOB ATTEMPT EXIT_CODE HOW   # exits 0: requeue, 3: stop
    python -m dist_transformer.cluster.requeue exclude RUN_FOLDER PREFLIGHT_FOLDER SPARE  # exits 0: nodes were added
    python -m dist_transformer.cluster.requeue excluded RUN_FOLDER NODES                  # NODES and the run's own

HOW is `decide`, `cancelled` when a person ended the job, `ended` when Slurm did, `preflight` when training never
began; any other exit code of `end` means that it could not decide. SPARE is the number of spare nodes for the job. An
attempt that made a new checkpoint may always be followed by another. Without one, at most
`slurm.max_restarts_without_progress` attempts follow, so that a job that always fails at the same place ends.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.loading import load_config
from dist_transformer.config.slurm_schema import LOST_ATTEMPTS, SlurmConfig
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR, MachineError, UserError
from dist_transformer.files import write_json
from dist_transformer.run.attempts import attempts, newest_checkpoint
from dist_transformer.run.excluded_nodes import exclude, excluded_nodes, reasons_of_preflight
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record

EXIT_STOP = 3
"""Exit code of `end` for a job that is not requeued. Not 1, with which a failing Python ends."""


@dataclass(frozen=True)
class Decision:
    """Decision whether the job is requeued; `reason` is a line for the job's log."""

    requeue: bool
    reason: str


def run_folder(arguments: list[str]) -> RunDir:
    """The run folder that `train` with these arguments works on.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    if Path(arguments[0]).is_dir():
        return RunDir(Path(arguments[0]))
    run = load_config(Path(arguments[0]), arguments[1:], check_files=False).run
    return RunDir(Path(run.root) / run.name)


def begin(run_dir: RunDir, job: str, attempt: int, max_restarts: int) -> None:
    """Records that an attempt begins.

    Raises:
        MachineError: too many earlier attempts ended without a decision and without a new checkpoint, as happens when a
            node dies each time: Slurm itself would start them forever.
    """
    newest = newest_checkpoint(run_dir)
    same = [r for r in attempts(run_dir) if (r["event"], r["job"], r.get("newest")) == ("began", job, newest)]
    if len(same) > LOST_ATTEMPTS * max_restarts:
        raise MachineError(
            f"{run_dir.path}: {len(same)} attempts of job {job} began after checkpoint {newest} and made no other; given "
            "up. Look at the log of the job and at its nodes, then submit it again"
        )
    _note(run_dir, "began", job, attempt, newest=newest, nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
          ranks=int(os.environ.get("SLURM_NTASKS", "1")))  # fmt: skip


def decide(run_dir: RunDir, exit_code: int, max_restarts: int) -> Decision:
    """Decides whether the job is requeued after an attempt with this exit code; counts the attempt if it is."""
    if exit_code in (EXIT_DONE, EXIT_USER_ERROR):
        return Decision(False, "done" if exit_code == EXIT_DONE else "a mistake that a restart cannot fix")
    if exit_code == EXIT_REQUEUE and run_dir.stop_file.exists():
        return Decision(False, f"stopped by the file {run_dir.stop_file}")
    newest, without_progress = newest_checkpoint(run_dir), 0
    before = read_record(run_dir.restarts)
    if before and before.get("newest_checkpoint") == newest:
        without_progress = before.get("without_progress", 0)
    if without_progress >= max_restarts:
        return Decision(False, f"{without_progress} restarts without a new checkpoint after {newest or 'the start'}")
    write_json(run_dir.restarts, {"newest_checkpoint": newest, "without_progress": without_progress + 1})
    start = f"resumes from {newest}" if newest else "begins again, as there is no checkpoint yet"
    left = f"; restart {without_progress + 1} of {max_restarts} without a new one" if without_progress else ""
    return Decision(True, start + left)


def end(run_dir: RunDir, job: str, attempt: int, exit_code: int, how: str) -> Decision:
    """Decides after an attempt, and records the decision.

    Raises:
        MachineError: the run folder is not visible; none is created in place of a disk that is not mounted.
    """
    if not run_dir.slurm.is_dir():
        raise MachineError(f"{run_dir.slurm}: is gone; is the disk of the run folder away?")
    if how == "cancelled":
        decision = Decision(False, "cancelled")
    elif how == "ended":
        decision = Decision(False, "ended by Slurm, which decides what follows")
    elif how == "preflight":
        decision = Decision(True, "away from nodes that the preflight found bad")
    else:
        decision = decide(run_dir, exit_code, _max_restarts(run_dir))
    _note(
        run_dir, "ended", job, attempt, exit_code=exit_code, how=how, requeued=decision.requeue,
        reason=decision.reason, newest=newest_checkpoint(run_dir),
    )  # fmt: skip
    return decision


def _note(run_dir: RunDir, event: str, job: str, attempt: int, **values: Any) -> None:
    record = {"event": event, "time": round(time.time(), 3), "job": job, "attempt": attempt, **values}
    with run_dir.attempts.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _num_nodes() -> int:
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def _max_restarts(run_dir: RunDir) -> int:
    # A first attempt that failed very early has left no configuration.
    if not run_dir.config.exists():
        return SlurmConfig.model_validate({}).max_restarts_without_progress
    return load_config(run_dir.config, check_files=False).slurm.max_restarts_without_progress


def _nodes_to_exclude(run_dir: RunDir, given: str) -> str:
    """Nodes that Slurm excludes already and the run's own, because a new list replaces the old one."""
    listed = [] if given in ("", "(null)") else [given]
    return ",".join([*listed, *(node for node in excluded_nodes(run_dir) if node not in given.split(","))])


def main(arguments: list[str]) -> int:
    """Runs a command of the batch script and returns the exit code."""
    try:
        match arguments:
            case ["begin", job, attempt, _, *_]:
                run_dir = run_folder(arguments[3:])
                run_dir.slurm.mkdir(parents=True, exist_ok=True)
                begin(run_dir, job, int(attempt), _max_restarts(run_dir))
                print(run_dir.path)
                return 0
            case ["end", folder, job, attempt, exit_code, ("decide" | "cancelled" | "ended" | "preflight") as how]:
                decision = end(RunDir(Path(folder)), job, int(attempt), int(exit_code), how)
                print("requeued:" if decision.requeue else "not requeued:", decision.reason, flush=True)
                return 0 if decision.requeue else EXIT_STOP
            case ["exclude", folder, preflight, spare]:
                reasons = reasons_of_preflight(Path(preflight) / "report.json")
                added = exclude(RunDir(Path(folder)), reasons, _num_nodes(), int(spare))
                for node, reason in added.items():
                    print(f"excluded: {node}: {reason}")
                return 0 if added else 1
            case ["excluded", folder, given]:
                print(_nodes_to_exclude(RunDir(Path(folder)), given))
                return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"the run folder cannot be read or written: {error}", file=sys.stderr)
        return EXIT_FAILED
    print("expected: begin JOB ATTEMPT CONFIG_OR_RUN_FOLDER [section.key=value ...], end RUN_FOLDER JOB ATTEMPT EXIT_CODE "
          "HOW, exclude RUN_FOLDER PREFLIGHT_FOLDER SPARE, or excluded RUN_FOLDER NODES; "
          f"got: {' '.join(arguments) or 'nothing'}", file=sys.stderr)  # fmt: skip
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
