"""Finds the run folder and the job id of a run from either of them."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dist_transformer.cluster.queue import QueuedJob, jobs_of
from dist_transformer.cluster.slurm import SlurmError, is_job_id
from dist_transformer.errors import UserError
from dist_transformer.run.attempts import attempts, may_be_hidden, submitted_at
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record


@dataclass(frozen=True)
class RunRef:
    """A run and its newest job; None: the run was never submitted to Slurm."""

    run_dir: RunDir
    job_id: str | None


def find_run(text: str, root: Path) -> RunRef:
    """The run that `text` names. Raises UserError: `text` is neither, or names no known run.

    Args:
        text: a run folder, or a job id: 123, or 123_4 for a task of an array.
        root: the folder of runs, searched for a job that Slurm has forgotten.
    """
    folder = Path(text)
    if folder.is_dir():
        refuse_unreadable(folder)
        if not is_run_folder(folder):
            raise UserError(f"{folder}: is not a run folder: it has no config.yaml; `list` shows the runs of a folder")
        return RunRef(RunDir(folder.absolute()), newest_job_id(RunDir(folder.absolute())))
    if not is_job_id(text):
        problem = "is a file" if folder.is_file() else "no such folder, and no job id"
        raise UserError(f"{text}: {problem}; expected a run folder (run.root/run.name), or a job id like 123 or 123_4")
    try:
        found, known = _folder_by_comment(text), "squeue and sacct show no run folder of it"
    except SlurmError as error:
        found, known = None, f"Slurm could not be asked ({str(error).splitlines()[0].partition(';')[0]})"
    moved = None if found and is_run_folder(found) else _folder_by_files(text, root)
    # Another name may be that of another run: jobs of two clusters with one file system have the same ids.
    if moved and (found is None or moved.name == found.name):
        found = moved
    if found is None:
        raise UserError(f"job {text}: {known}, and no run in {root}/ was submitted as it; give its folder, or --root")
    if not is_run_folder(found):
        raise UserError(f"job {text}: its run folder {found} is not there; was it moved or removed? If moved, name it")
    return RunRef(RunDir(found), text)


def own_job(job: QueuedJob | None, run_dir: RunDir) -> QueuedJob | None:
    """The job, unless its comment names another folder: clusters that share a file system count alike. Jobs started by hand
    or by an earlier version have no comment. A hidden job is over if the run has recorded that: accounts may miss an end."""
    if job and job.reason == "PrivateData" and not may_be_hidden(run_dir, job.job_id):
        job = replace(job, reason="")
    there = job and job.folder  # no folder any more: it was moved
    return None if there and os.path.isdir(there) and not os.path.samefile(there, run_dir.path) else job


def refuse_unreadable(folder: Path) -> None:
    """Raises UserError for a folder that may not be read."""
    try:
        os.listdir(folder)
        os.stat(folder / ".")
    except OSError as error:
        raise UserError(f"{folder}: you may not look into this folder ({error.strerror}); ask its owner") from None


def is_run_folder(folder: Path) -> bool:
    run_dir = RunDir(folder)
    return any(map(os.path.isfile, (run_dir.config, run_dir.state, run_dir.job, run_dir.attempts)))


def newest_job_id(run_dir: RunDir) -> str | None:
    """The newest job of a run: the one submitted last, or a later one that was started by hand."""
    note, later = read_record(run_dir.job), [*attempts(run_dir)]
    job_id = note["job_id"] if is_job_id(note.get("job_id")) else None
    if job_id and isinstance(note.get("attempts"), int):  # counted, as the clocks of nodes differ
        later = later[note["attempts"] :]
    elif job_id:  # submitted by an earlier version
        since = submitted_at(run_dir, 0.0)
        later = [record for record in later if record["time"] > since]
    begun = [record for record in later if record["event"] == "began"]
    return str(begun[-1]["job"]) if begun else job_id


def _folder_by_comment(job_id: str) -> Path | None:
    found = jobs_of(job_id)
    if "_" not in job_id and any("_" in job.job_id for job in found):
        raise UserError(
            f"job {job_id}: is an array of tasks: name one of them, like {job_id}_1; `scancel {job_id}` ends all"
        )
    return next((Path(job.folder) for job in found if job.folder is not None), None)


def _folder_by_files(job_id: str, root: Path) -> Path | None:
    for run_dir in (RunDir(path.parents[1].absolute()) for path in sorted(root.glob("*/slurm/job.json"))):
        note = read_record(run_dir.job)
        if job_id in (str(note.get("job_id")), *map(str, note.get("stages", {}).values())):
            return run_dir.path
    by_hand = (path.parents[1].absolute() for path in sorted(root.glob("*/slurm/attempts.jsonl")))
    return next((folder for folder in by_hand if worked_on(RunDir(folder), job_id)), None)


def worked_on(run_dir: RunDir, job_id: str | None) -> bool:
    """True if an attempt of this job is recorded in the run folder."""
    return any(str(record.get("job")) == job_id for record in attempts(run_dir))
