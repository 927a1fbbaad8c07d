"""Submission of a checked configuration: the exact scripts, `sbatch` commands, and files of the run folder.

submission, _ = checked_submission(run, overrides, ["train"], after=[])   # touches nothing
job_ids = submit(submission)                                              # writes, then calls sbatch
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dist_transformer.cluster import checks
from dist_transformer.cluster.job_status import ask_slurm
from dist_transformer.cluster.jobs import Job, job_of
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.run_ref import RunRef, newest_job_id
from dist_transformer.cluster.script import needed_folders, render_script
from dist_transformer.cluster.slurm import PerhapsSubmitted, SlurmError, submit_script
from dist_transformer.config.credentials import ADDRESS_VARIABLE, tracking_address
from dist_transformer.config.loading import to_yaml, with_absolute_paths
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import STAGES, SlurmConfig, Stage
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import ConfigError, UserError, say
from dist_transformer.files import replacing, write_json, write_text
from dist_transformer.planning.vocabularies import count_parameters, with_counted_pieces
from dist_transformer.run.attempts import attempts, may_be_hidden
from dist_transformer.run.excluded_nodes import excluded_nodes
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import while_nobody_submits
from dist_transformer.run.read_run import read_run
from dist_transformer.run.records import read_record_patiently
from dist_transformer.run.resume_checks import stage_problems
from dist_transformer.run.snapshot import take_snapshot


@dataclass(frozen=True)
class Submission:
    """Plan of `submit`. `files` are written into the run folder before sbatch is called.

    Each job waits for the one before it, the first one for the jobs `after`.
    """

    run_dir: RunDir
    files: dict[Path, str]
    jobs: tuple[Job, ...]
    after: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """The calls of sbatch as shell commands; a job id that is not known yet is the stage in capitals."""
        waits = [self.after, *((job.stage.upper(),) for job in self.jobs)]
        calls = (job.sbatch_arguments(after) for job, after in zip(self.jobs, waits, strict=False))
        return [shlex.join(["sbatch", *arguments]) for arguments in calls]

    @property
    def listing(self) -> str:
        """Every command and every file, for --dry-run."""
        commands = (f"# command (the files below must be written first)\n{command}\n" for command in self.commands)
        return "\n".join([*commands, *(f"# {path}\n{text}" for path, text in self.files.items())])


def checked_submission(
    run: Path, overrides: list[str], stages: Sequence[Stage], after: Sequence[str], *, dry_run: bool = False
) -> tuple[Submission, SlurmConfig]:
    """Returns the plan of a submission that passed all checks, with its settings; nothing is written. Raises ConfigError:
    all problems of the run together; UserError: see `read_stages` and `read_job_ids`."""
    stages, after = read_stages(stages), read_job_ids(after)
    config, run_dir = read_run(run, overrides)
    config = fill_from_profile(config)
    lines = (*config.slurm.setup, *config.slurm.environment)
    if config.tracking.enabled and not any(ADDRESS_VARIABLE in line for line in lines):
        tracking_address(config.tracking)  # the job inherits the variable: raises if it holds no address
    problems = [*first_pairs_problems(config), *(() if dry_run else checks.after_problems(after))]
    submission = plan_submission(config, run_dir, stages=stages, after=after, problems=problems, dry_run=dry_run)
    return submission, config.slurm


def read_stages(given: Sequence[str]) -> tuple[Stage, ...]:
    """Returns the stages. UserError: none, another word, another order, one twice, or one text in place of a list."""
    words = _listed(given)
    stages = tuple(stage for stage in STAGES if stage in words)
    if not stages or [*stages] != words:
        raise UserError(f"stages: expected some of {','.join(STAGES)}, each once and in this order; got {given!r}")
    return stages


def read_job_ids(given: Sequence[str]) -> tuple[str, ...]:
    """Returns the ids. UserError: one is no text like `12` or `13_4`, or there is one text in place of a list."""
    ids = _listed(given)
    if not all(isinstance(each, str) and re.fullmatch(r"[0-9]+(_[0-9]+)?", each) for each in ids):
        raise UserError(f"after: expected ids of jobs, each a text: 12, or 12 and 13_4; got {given!r}")
    return tuple(ids)


def _listed(given: Any) -> list[Any]:
    """The elements; of one text, or of what has none, a list of None."""
    return [*given] if isinstance(given, Iterable) and not isinstance(given, str) else [None]


def plan_submission(
    config: Config,
    run_dir: RunDir,
    *,
    stages: Sequence[Stage] = ("train",),
    after: Sequence[str] = (),
    problems: Sequence[str] = (),
    dry_run: bool = False,
    is_anew: bool = False,
) -> Submission:
    """Checks everything and builds the jobs, without creating anything. Raises ConfigError: all problems together.

    Args:
        config: the resolved configuration, with its cluster profile filled in; the jobs read it in the run folder.
        stages: one job each.
        after: ids of jobs that must succeed before the first stage begins.
        problems: problems found by the caller, reported together with the others.
        dry_run: for display only: works without Slurm, and while a job works on the run folder.
        is_anew: what is in the run folder now will be set aside, and does not count.
    """
    found = [*checks.memory_problems(config), *problems]
    found += [] if is_anew else stage_problems(config, run_dir, stages, after)
    num_parameters = count_parameters(with_counted_pieces(config))
    found += checks.submission_problems(config, run_dir, num_parameters, is_after_others=bool(after), is_anew=is_anew)
    found += [] if dry_run else [*checks.sbatch_problems(), *checks.busy_problems(run_dir)]
    if found:
        raise ConfigError(found, "cannot submit:")
    run_dir = RunDir(run_dir.path.absolute())
    excluded = [] if is_anew else [*excluded_nodes(run_dir)]
    jobs = tuple(job_of(stage, config.slurm, run_dir, excluded) for stage in stages)
    folders = needed_folders(config, run_dir.path.parent)
    scripts = {job.script: render_script(job.script.name, config.slurm, run_dir.snapshot, folders) for job in jobs}
    text = to_yaml(with_absolute_paths(config, None))
    return Submission(run_dir, {run_dir.config: text, **scripts}, jobs, tuple(after))


def submit(submission: Submission) -> dict[str, str]:
    """Writes files and code snapshot, calls sbatch, records the jobs in the run folder; returns each stage's job id.

    Raises:
        UserError: another submission, or its job, works on the run folder.
        SlurmError: sbatch failed. The run folder is as it was before; jobs of earlier stages that were accepted are in
            job.json and in the message.
    """
    run_dir, ids, after = submission.run_dir, dict[str, str](), submission.after
    with while_nobody_submits(run_dir):
        if found := checks.busy_problems(run_dir):  # of a submission that has ended since the checks
            raise ConfigError(found, "cannot submit:")
        newest = newest_job_id(run_dir)
        if newest and may_be_hidden(run_dir, newest) and not (told := ask_slurm(RunRef(run_dir, newest))).was_asked:
            say(f"warning: {told.problem}")
        for job in submission.jobs:
            ids[job.stage] = _submit_next(job, after, ids) if ids else _submit_first(submission)
            if job.stage == "train" or "train" not in ids:
                command = shlex.join(["sbatch", *job.sbatch_arguments(after)])
            note_job(run_dir, ids, command)
            after = (ids[job.stage],)
    return ids


def note_job(run_dir: RunDir, ids: Mapping[str, str], command: str) -> None:
    """Writes job.json; its job_id, which `status` and `logs` look at, is the training job's, or else the last one's."""
    old = read_record_patiently(run_dir.job)
    others = [job for stage, job in old.get("stages", {}).items() if stage != "train"]
    kept = None if old.get("job_id") in others else old.get("job_id")  # a training job's
    job_id = ids.get("train") or kept or list(ids.values())[-1]
    submitted_at = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"job_id": job_id, "submitted_at": submitted_at, "command": command, "attempts": len([*attempts(run_dir)])}
    write_json(run_dir.job, note if set(ids) == {"train"} else {**note, "stages": dict(ids)})


def _submit_first(submission: Submission) -> str:
    run_dir = submission.run_dir
    # The job may start at once: it must find its files and no old stop file.
    changed = [*submission.files, run_dir.restarts, run_dir.stop_file]
    try:
        with _rolled_back_if_refused(changed, run_dir.snapshot):
            take_snapshot(run_dir.snapshot)
            for path, text in submission.files.items():
                # Scripts for their owner: `slurm.setup` may hold private values.
                write_text(path, text, mode=0o600 if path.suffix == ".sbatch" else 0o666)
            run_dir.restarts.unlink(missing_ok=True)  # counted anew, as a person submits it
            run_dir.stop_file.unlink(missing_ok=True)
            return submit_script(submission.jobs[0].sbatch_arguments(submission.after))
    except SlurmError as error:
        raise SlurmError(f"{error}; nothing was changed in the run folder") from error


@contextmanager
def _rolled_back_if_refused(files: Sequence[Path], snapshot: Path) -> Iterator[None]:
    """Restores `files` and `snapshot` after any error inside the context, unless there may be a job that needs them."""
    # Renamed, not read, and where they are: of a colleague who submitted the run before, they can be neither read nor moved.
    ours = [path for path in (snapshot, *files) if path.parent == snapshot.parent and path.exists()]
    aside = {path: path.with_name(f"{path.name}.{os.getpid()}.before") for path in ours}
    before = {path: path.read_bytes() if path.is_file() and path not in aside else None for path in files}
    for path, other in aside.items():
        path.rename(other)
    try:
        yield
    except PerhapsSubmitted:
        raise
    except BaseException:
        shutil.rmtree(snapshot, ignore_errors=True)
        for path, old in before.items():
            if old is None:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.read_bytes() != old:
                with replacing(path) as temporary:
                    temporary.write_bytes(old)
        for path, other in aside.items():
            other.rename(path)
        raise
    for other in snapshot.parent.glob("*.before"):
        with suppress(OSError):
            shutil.rmtree(other) if other.is_dir() else other.unlink()


def _submit_next(job: Job, after: Sequence[str], ids: Mapping[str, str]) -> str:
    try:
        return submit_script(job.sbatch_arguments(after))
    except (SlurmError, PerhapsSubmitted) as error:
        taken = ", ".join(f"{job_id} ({stage})" for stage, job_id in ids.items())
        back = f"to take it back: scancel {' '.join(ids.values())}"
        raise type(error)(f"{error}\n  already submitted: {taken}; {back}") from error
