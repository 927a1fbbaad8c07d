"""The decision after each attempt of a training job: ranks again on the nodes that answer, requeue, or the end.

An attempt that made a new checkpoint may always be followed by another. Without one, at most
`slurm.max_restarts_without_progress` attempts follow, so that a job that always fails at the same place ends.
"""

import math
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dist_transformer.config.loading import load_config
from dist_transformer.config.slurm_schema import LOST_ATTEMPTS, SlurmConfig
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, MachineError, UserError
from dist_transformer.files import refresh, write_json
from dist_transformer.run.attempts import attempts, newest_checkpoint
from dist_transformer.run.excluded_nodes import excluded_nodes
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import add_event
from dist_transformer.run.records import read_record_patiently

How = Literal["decide", "barred", "cancelled", "ended", "preflight"]
"""Who ended an attempt: `decide`, `barred` (no requeues): its ranks; `cancelled`: a person; `ended`: Slurm; `preflight`."""

SUSPENDED_SECONDS = 30.0
"""Stop of the batch script from which on its ranks were suspended with it, and have not failed by themselves."""


@dataclass(frozen=True)
class NextNodes:
    """Nodes of the job on which ranks may start at once. `words`: which nodes that the ranks before had are left out, and
    why; empty without any."""

    nodes: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class Decision:
    """Decision on what follows an attempt: the end, a requeue, or `again`, ranks in the same allocation. `reason`: for logs.
    `count`: the new content of restarts.json, if another attempt follows."""

    then: Literal["stop", "requeue", "again"]
    reason: str
    count: dict[str, Any] | None = None


def run_folder(arguments: list[str]) -> RunDir:
    """The run folder that `train` with these arguments works on. Raises ConfigError: the configuration cannot be read;
    UserError: there are no arguments."""
    if not arguments:
        raise UserError("expected a YAML file or a run folder, got no argument: sbatch ... slurm/train.sbatch CONFIG")
    if Path(arguments[0]).is_dir():
        return RunDir(Path(arguments[0]))
    run = load_config(Path(arguments[0]), arguments[1:], check_files=False).run
    return RunDir(Path(run.root) / run.name)


def begin(run_dir: RunDir, job: str, attempt: int) -> None:
    """Records that an attempt begins. Raises MachineError: too many earlier attempts ended without a decision and
    without a new checkpoint, as happens when a node dies each time: Slurm itself would start them forever."""
    run_dir.slurm.mkdir(parents=True, exist_ok=True)
    newest = newest_checkpoint(run_dir)
    same = [r for r in attempts(run_dir) if (r["event"], r["job"], r.get("newest")) == ("began", job, newest)]
    if len(same) > LOST_ATTEMPTS * _max_restarts(run_dir):
        raise MachineError(
            f"{run_dir.path}: {len(same)} attempts of job {job} began after checkpoint {newest} and made no other; given "
            "up. Look at the log of the job and at its nodes, then submit it again"
        )
    num_ranks = int(os.environ.get("SLURM_NTASKS", "1"))
    note_begin(run_dir, job, attempt, os.environ.get("SLURM_JOB_NODELIST", ""), num_ranks)


def note_begin(run_dir: RunDir, job: str, attempt: int, nodes: str, num_ranks: int) -> None:
    """Records that ranks start on these nodes."""
    _note(run_dir, "began", job, attempt, nodes=nodes, ranks=num_ranks)


def first_failure(path: Path) -> tuple[int, str] | None:
    """Exit code and node of the first rank that failed, as launch/slurm_task.sh writes them; None: none did."""
    try:
        code, _, node = path.read_text(encoding="utf-8").strip().partition(" ")
        return int(code), node
    except (OSError, ValueError):
        return None


def exit_without_failure(run_dir: RunDir, code: int) -> int:
    """Exit code of ranks without a recorded failure, from srun's. Its 2 is Slurm's own, if a node does not see the program:
    a restart may fix that. It is 0, too, if Slurm has taken the node of a rank, or srun waited in vain for ranks to end."""
    with suppress(MachineError):  # the decision waits for the disk
        if code == EXIT_DONE and read_record_patiently(run_dir.state).get("state") == "finished":
            return code
    return EXIT_FAILED if code in (EXIT_DONE, EXIT_USER_ERROR) else code


def save_time(end: str) -> float:
    """Unix seconds at which ranks must save, from those of the end of their job as Slurm prints them; inf: it names none."""
    known = int(end) if end.isdecimal() and end != "0" else math.inf
    return known - float(os.environ.get("DIST_TRANSFORMER_SIGNAL_SECONDS", 180))


def next_nodes(
    before: Sequence[str], of_job: Collection[str], answering: Collection[str], suspects: Collection[str], wanted: int
) -> NextNodes | None:
    """The nodes of the job for ranks after a failure; None if fewer than half of the `wanted` ones are left.

    Args:
        before: the nodes of the ranks that failed.
        of_job, answering: all nodes that the job still has, spare ones too; those that answer now, in their order.
        suspects: nodes on which ranks failed first, twice in a row.
    """
    nodes = tuple([node for node in answering if node not in suspects][:wanted])
    left_out: dict[str, list[str]] = {}
    for node in (each for each in before if each not in nodes):
        up = "ranks failed on {} twice" if node in answering else "{} gives no answer"
        left_out.setdefault(up if node in of_job else "{} was taken from the job", []).append(node)
    words = [text.format(", ".join(which)) for text, which in left_out.items()]
    return None if 2 * len(nodes) < wanted else NextNodes(nodes, " and ".join(words))


def decide(
    run_dir: RunDir, exit_code: int, max_restarts: int, left: NextNodes | None = None, stopped_seconds: float = 0.0
) -> Decision:
    """Decides after an attempt with this exit code.

    Args:
        left: nodes on which ranks may start again. They do if there was a new checkpoint since the last restart, or if
            they are other nodes than before; else the job is requeued, and may get others.
        stopped_seconds: longest stop of the job meanwhile: a suspension does not count as a restart without a checkpoint,
            LOST_ATTEMPTS times as often as other restarts.
    """
    if exit_code in (EXIT_DONE, EXIT_USER_ERROR):
        return Decision("stop", "done" if exit_code == EXIT_DONE else "a mistake that a restart cannot fix")
    if run_dir.stop_file.exists():  # also if the save of the stop failed
        return Decision("stop", f"stopped by the file {run_dir.stop_file}")
    refresh(run_dir.checkpoints)  # another machine wrote the newest ones
    newest, without_progress, spared = newest_checkpoint(run_dir), 0, 0
    before = read_record_patiently(run_dir.restarts)
    if before and before.get("newest_checkpoint") == newest:
        without_progress, spared = before.get("without_progress", 0), before.get("suspended", 0)
    is_spared = stopped_seconds >= SUSPENDED_SECONDS and spared < LOST_ATTEMPTS * max_restarts
    suspended = f"; the job was suspended for {stopped_seconds:.0f} s" if is_spared else ""
    if without_progress >= max_restarts and not suspended:
        return Decision("stop", f"{without_progress} restarts without a new checkpoint after {newest or 'the start'}")
    restarts = without_progress + (not suspended)
    count = {"newest_checkpoint": newest, "without_progress": restarts, "suspended": spared + is_spared}
    start = f"resumes from {newest}" if newest else "begins again, as there is no checkpoint yet"
    start += suspended + (f"; restart {restarts} of {max_restarts} without a new one" if without_progress else "")
    if left is None or (without_progress and not left.words):
        return Decision("requeue", start, count)
    without = f" ({left.words})" if left.words else ""
    return Decision("again", f"on {', '.join(left.nodes)}{without}: {start}", count)


def end(
    run_dir: RunDir, job: str, attempt: int, exit_code: int, how: How, left: NextNodes | None = None, stopped: float = 0
) -> Decision:
    """Decides after an attempt, records the decision, and counts the attempt if another follows. Arguments: see
    `decide`. Raises MachineError: the run folder is not visible; none is created in place of a disk that is not
    mounted."""
    if not run_dir.slurm.is_dir():
        raise MachineError(f"{run_dir.slurm}: is gone; is the disk of the run folder away?")
    of_others = {
        "cancelled": Decision("stop", "cancelled"),
        "ended": Decision("stop", "ended by Slurm, which decides what follows"),
        "preflight": Decision("requeue", "away from nodes that the preflight found bad"),
    }
    decision = of_others.get(how) or decide(run_dir, exit_code, _max_restarts(run_dir), left, stopped)
    if decision.then == "requeue" and how == "barred":
        again = f"`dist-transformer resume {run_dir.quoted}`, and ask your administrators"
        decision = Decision("stop", f"requeues are disabled for this job: {again}")
    is_requeued = decision.then == "requeue"
    _note(run_dir, "ended", job, attempt, exit_code=exit_code, how=how, requeued=is_requeued, reason=decision.reason)
    if decision.count is not None:  # after the record: a decision whose record failed is made again, and counts once
        write_json(run_dir.restarts, decision.count)
    return decision


def note_lost_host(run_dir: RunDir, job: str, attempt: int, host: str) -> None:
    """Records that the job is requeued because its batch script is gone with its node."""
    reason = f"{host} went down, and with it the batch script: requeued"
    _note(run_dir, "ended", job, attempt, exit_code=None, how="lost", requeued=True, reason=reason)


def _note(run_dir: RunDir, event: str, job: str, attempt: int, **values: Any) -> None:
    add_event(run_dir.attempts, event, {"job": job, "attempt": attempt, "newest": newest_checkpoint(run_dir), **values})


def _max_restarts(run_dir: RunDir) -> int:
    # A first attempt that failed very early has left no configuration.
    slurm = load_config(run_dir.config, check_files=False).slurm if run_dir.config.exists() else SlurmConfig()
    return slurm.max_restarts_without_progress


def nodes_to_exclude(run_dir: RunDir, given: str) -> str:
    """Nodes that Slurm excludes already (a list in its words) and the run's own: a new list replaces the old one."""
    listed = [] if given in ("", "(null)") else [given]
    return ",".join([*listed, *(node for node in excluded_nodes(run_dir) if node not in given.split(","))])
