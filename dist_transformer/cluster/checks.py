"""Checks before a job is submitted. Each check yields messages; `submit` reports all of them at once."""

import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from dist_transformer.cluster.queue import jobs_of, known_jobs, seconds_of
from dist_transformer.cluster.run_ref import newest_job_id, own_job
from dist_transformer.cluster.script import needed_folders
from dist_transformer.cluster.slurm import is_job_id
from dist_transformer.config.checks import check_lanes, file_problems, run_name_problems
from dist_transformer.config.credentials import secret_problems
from dist_transformer.config.model_size import checkpoints_bytes
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import SlurmConfig, listed
from dist_transformer.errors import DataError, UserError
from dist_transformer.files import modified
from dist_transformer.planning.vocabularies import with_counted_pieces
from dist_transformer.run.attempts import may_be_hidden, newest_checkpoint
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import BEAT_SECONDS, STALE_BEATS
from dist_transformer.run.outputs import check_run_folder
from dist_transformer.run.records import read_record, read_record_patiently, records_of, records_of_training
from dist_transformer.run.resume_checks import checkpoint_problems, initial_weights_problems
from dist_transformer.run.tail import last_lines

SIGNAL_EARLY_SECONDS = 60
"""Seconds by which the signal may come early, from sbatch(1), --signal."""

RECENT_BYTES = 1 << 18
"""Bytes read from the end of metrics.jsonl: a few hundred records, from which times are measured."""

_OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*")
_INSTEAD = {
    "nodes": "slurm.nodes", "ntasks-per-node": "slurm.ranks_per_node", "cpus-per-task": "slurm.cpus_per_rank",
    "ntasks": "slurm.nodes and slurm.ranks_per_node", "time": "slurm.time_limit", "signal": "slurm.signal_seconds",
    "gpus-per-node": "slurm.gpus_per_node, and slurm.sbatch.gres for their kind",
    "export": "slurm.environment", "export-file": "slurm.environment", "array": "a node for each run: submit --pipeline",
    "dependency": "submit --after", "kill-on-invalid-dep": "submit --after", "job-name": "run.name",
}  # fmt: skip
"""Options of sbatch that submit sets itself, and what says them."""
_OTHERS = "requeue no-requeue open-mode output error wrap parsable chdir comment"
_WITHOUT_ANSWER = ("wait", "quiet", "test-only")
_RELIED_ON = (*_INSTEAD, *_OTHERS.split(), *_WITHOUT_ANSWER)
_READ_HERE = ("exclude", "gres", "clusters", "time-min")
_SRUN_KEYS = {"container-image": "container_image", "container-mounts": "container_mounts"}
_NODES = re.compile(r"[A-Za-z0-9._-]+(\[[0-9,-]+\][A-Za-z0-9._-]*)*(,[A-Za-z0-9._-]+(\[[0-9,-]+\][A-Za-z0-9._-]*)*)*")
_SET_BY_THE_JOB = re.compile(r"(SLURM_|SRUN_|SBATCH_|MASTER_).*|(LOCAL_)?(RANK|WORLD_SIZE)|PYTHONPATH|PYTHONSAFEPATH")


def submission_problems(
    config: Config, run_dir: RunDir, num_parameters: int, *, is_after_others: bool = False, is_anew: bool = False
) -> list[str]:
    """All problems that can be found without asking Slurm. Nothing is created.

    `is_after_others`: jobs that run first may still create missing files. `is_anew`: what is on disk does not count.
    """
    if is_anew:
        return [*name_problems(run_dir), *job_problems(config, run_dir)]
    on_disk = [*_folder_problems(run_dir, checkpoints_bytes(config, num_parameters)), *_data_problems(config, run_dir)]
    return [*name_problems(run_dir), *on_disk, *start_problems(config, run_dir, is_after_others=is_after_others)]


def job_problems(config: Config, run_dir: RunDir) -> Iterator[str]:
    """Problems of the job that the configuration asks for, regardless of the files on disk."""
    yield from _rank_problems(config)
    yield from slurm_problems(config.slurm, needed_folders(config, run_dir.path.parent))


def slurm_problems(slurm: SlurmConfig, folders: list[Path]) -> Iterator[str]:
    """Problems of the settings of any job, which needs these folders."""
    yield from time_problems(slurm)
    yield from _option_problems(slurm)
    yield from _container_problems(slurm, folders)
    yield from _environment_problems(slurm)


def start_problems(config: Config, run_dir: RunDir, *, is_after_others: bool = False) -> Iterator[str]:
    """Problems of a start or a resume, but those of its name, its data, memory and room on the disk."""
    yield from _checkpoint_problems(config, run_dir)
    yield from _measured_problems(config, run_dir)
    yield from () if is_after_others else initial_weights_problems(config, run_dir)
    yield from job_problems(config, run_dir)


def memory_problems(config: Config) -> list[str]:
    """Problem of a run that does not fit the GPUs of the partition, if slurm.gpu_memory_gb gives their size."""
    slurm = config.slurm
    if slurm.gpu_memory_gb is None or not slurm.gpus_per_node:
        return []
    from dist_transformer.planning.memory import memory_problem  # numpy

    problem = memory_problem(with_counted_pieces(config), slurm.nodes * slurm.ranks_per_node, slurm.gpu_memory_gb)
    return [] if problem is None else [f"slurm.gpu_memory_gb: {problem}"]


def sbatch_problems() -> list[str]:
    """Problem that keeps this machine from submitting jobs."""
    if shutil.which("sbatch") is None:
        return ["sbatch: not found on PATH; submit from a login node of the cluster, or look at it with --dry-run"]
    return []


def busy_problems(run_dir: RunDir) -> list[str]:
    """Jobs and processes that already work on this run folder or wait to. Slurm is asked where `sbatch` exists."""
    note, of_owner = read_record_patiently(run_dir.job), read_record_patiently(run_dir.owner).get("job")
    newest = newest_job_id(run_dir) or ""
    ids = [*filter(is_job_id, [note.get("job_id"), *note.get("stages", {}).values(), newest, of_owner])]
    known = {} if sbatch_problems() else known_jobs(ids, [newest] if may_be_hidden(run_dir, newest) else [])
    known = {each: job for each, job in known.items() if own_job(job, run_dir)}
    busy = [f"job {job.job_id} already works on it ({job.state})" for job in known.values() if not job.is_over]
    return [
        f"run folder {run_dir.path}: {who}; wait for it, end it with "
        f"`dist-transformer stop {run_dir.quoted}`, or choose another run.name"
        for who in [*busy, *([] if of_owner in known else _live_process(run_dir))]
    ]


def after_problems(after: Sequence[str]) -> Iterator[str]:
    """Yields a problem for each job to wait for that has not ended well, or that Slurm does not know and would not wait for."""
    unknown = "shown neither by squeue nor by sacct (forgotten, hidden from you, or no answer of sacct)"
    for job_id in () if sbatch_problems() else after:
        states = {job.state if job.is_over else "COMPLETED" for job in jobs_of(job_id)} or {unknown}
        for bad in states - {"COMPLETED"}:  # what is not over may still end well
            yield f"after: job {job_id} is {bad}: expected one that waits, runs or has ended well: leave out what has"


def _rank_problems(config: Config) -> Iterator[str]:
    """Ranks that would have no lane or no GPU, and GPUs that would have no rank."""
    slurm = config.slurm
    yield from check_lanes(config.data, slurm)
    if slurm.gpus_per_node not in (0, slurm.ranks_per_node):
        given = f"{slurm.gpus_per_node} GPUs for {slurm.ranks_per_node} ranks on each node"
        yield f"slurm.gpus_per_node: {given}; a rank uses one GPU, so give as many in slurm.ranks_per_node"
    gres = ",".join(listed(slurm.sbatch.get("gres") or ()))
    counts = [item.rpartition(":")[2] for item in gres.split(",") if item.partition(":")[0] == "gpu"]
    number = f"slurm.gpus_per_node is {slurm.gpus_per_node} (0: CPU training)"
    if counts and sum(int(count) if count.isdecimal() else 1 for count in counts) != slurm.gpus_per_node:
        yield f"slurm.sbatch.gres: {gres!r} is given, but {number}; give their number there too"
    for name, value in slurm.sbatch.items():
        if value and not slurm.gpus_per_node and re.match("gpus-per-[st]|tres-per-.*gpu", f"{name} {value}"):
            yield f"slurm.sbatch.{name}: {value!r} is given, but {number}; use {_INSTEAD['gpus-per-node']}"


def _checkpoint_problems(config: Config, run_dir: RunDir) -> Iterator[str]:
    yield from checkpoint_problems(config, run_dir)
    if newest_checkpoint(run_dir):
        from dist_transformer.data.prepare.preparation import refuse_other_corpus  # pyarrow

        try:
            refuse_other_corpus(config)
        except DataError as error:
            yield str(error)


def _live_process(run_dir: RunDir) -> Iterator[str]:
    """Training that has a recent heartbeat: without Slurm, or in a job of which Slurm says nothing here."""
    owner = read_record(run_dir.owner)
    with suppress(FileNotFoundError):  # the process has just ended
        if owner and abs(time.time() - modified(run_dir.owner)) < STALE_BEATS * BEAT_SECONDS:
            job = "without a job" if owner.get("job") is None else f"in job {owner['job']}"
            yield f"process {owner.get('pid')} on {owner.get('host')} already works on it, {job}"


def name_problems(run_dir: RunDir) -> Iterator[str]:
    """Problems of the name, the place and the former content of a run folder, or of that of another node."""
    yield from run_name_problems(run_dir.name)
    try:
        check_run_folder(run_dir)
    except UserError as error:
        yield str(error)
    path = str(run_dir.path.absolute())
    if re.search(r"[\n\\\ud800-\udfff]", path):
        yield f"run.root: {path!r}: sbatch cannot write logs below a path with a backslash, line break or invalid UTF-8"
    if ":" in path:
        why = "the job finds its code, which lies in the run folder, by PYTHONPATH, and that ends a path at ':'"
        yield f"run.root: {path!r}: {why}; choose a folder without it (an existing run folder can be moved)"


def _folder_problems(run_dir: RunDir, checkpoints_bytes: int) -> Iterator[str]:
    folder = run_dir.path
    existing, is_writable = _existing(folder)
    if not is_writable:
        yield f"run folder {folder}: cannot be written ({existing} is no writable folder); change run.root"
        return
    free_bytes = shutil.disk_usage(existing).free
    needed_bytes = checkpoints_bytes - _size(run_dir.checkpoints)
    if free_bytes < needed_bytes:
        yield (
            f"run folder {folder}: {free_bytes / 1e9:.1f} GB free, but its checkpoints will take {needed_bytes / 1e9:.1f} "
            "GB more; free some, change run.root, or keep fewer (checkpoints.keep_last, keep_best, keep_every_steps)"
        )


def _existing(folder: Path) -> tuple[Path, bool]:
    """The folder, or the nearest one above it that exists, and whether something can be made in it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing, existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _size(folder: Path) -> int:
    """Bytes of the files in the folders of `folder`; of those that go meanwhile, none."""
    total = 0
    for file in folder.glob("*/*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def time_problems(slurm: SlurmConfig) -> Iterator[str]:
    """A time limit that is none, or leaves no time before the job is signalled to save."""
    limit_seconds = seconds_of(slurm.time_limit)
    if limit_seconds is None:
        yield f"slurm.time_limit: {slurm.time_limit!r}: expected hours:minutes:seconds or days-hours:minutes:seconds"
        return
    needed = slurm.signal_seconds + SIGNAL_EARLY_SECONDS
    if 0 < limit_seconds <= needed:  # 0: no limit
        yield (
            f"slurm.time_limit: {slurm.time_limit} is {limit_seconds} s, but the job is signalled to save "
            f"{slurm.signal_seconds} s before its end (slurm.signal_seconds), and Slurm may be "
            f"{SIGNAL_EARLY_SECONDS} s early; give more than {needed} s"
        )


def _data_problems(config: Config, run_dir: RunDir) -> Iterator[str]:
    prepared = config.data.prepared
    if prepared is None or (Path(prepared) / "manifest.json").is_file():
        return
    if run_dir.config.is_file():  # the text of a run folder may be gone; the loader looks for that of a YAML file
        for message in file_problems(config.data, config.tokenizer):
            yield f"{message} (the corpus in {prepared} is not prepared yet)"
    existing, is_writable = _existing(Path(prepared))
    if not is_writable:
        yield f"data.prepared: {prepared} cannot be written ({existing} is no writable folder), and holds no manifest.json"


def _measured_problems(config: Config, run_dir: RunDir) -> Iterator[str]:
    """Times measured in earlier attempts of this run that exceed the configured ones."""
    records = [*records_of_training(run_dir.metrics, RECENT_BYTES)][::-1]
    history = [*records_of(last_lines(run_dir.history, RECENT_BYTES))]
    starts = [each["time"] for each in history if each.get("event") == "start" and "time" in each]
    pairs = [(a, b) for a, b in pairwise(records) if not any(a["time"] < start <= b["time"] for start in starts)]
    seconds = [(b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairs if b["step"] > a["step"]]
    if not seconds:
        return
    step_seconds, every = statistics.median(seconds), config.checkpoints.every_steps
    limit_seconds = seconds_of(config.slurm.time_limit) or math.inf  # time_problems reports one that is none
    if step_seconds * every > limit_seconds:
        yield (
            f"checkpoints.every_steps: {every} steps of {step_seconds:.3g} s, as measured so far, are more than "
            f"slurm.time_limit {config.slurm.time_limit}: a job that fails would lose all it did; save more often"
        )
    write_seconds = statistics.median([each["write_seconds"] for each in history if "write_seconds" in each] or [0.0])
    # The save of the signal begins when one in flight has ended.
    saves = max(2 * write_seconds, *(record.get("save_seconds", 0.0) for record in records))
    needed = saves + step_seconds
    if needed > config.slurm.signal_seconds:
        yield (
            f"slurm.signal_seconds: {config.slurm.signal_seconds} s before the limit the job is signalled to save, but a step, "
            f"a save in flight and one more may take {needed:.0f} s, as measured in this run; give more than that"
        )


def _option_problems(slurm: SlurmConfig) -> Iterator[str]:
    for key, options in (("sbatch", slurm.sbatch), ("srun", slurm.srun)):
        for name, value in options.items():
            if not _OPTION_NAME.fullmatch(name):
                yield f"slurm.{key}: {name!r}: expected a long option of {key} without its dashes: nodelist, mem-per-cpu"
            if re.search("[\n\0]", "".join(map(str, listed(value)))):
                yield f"slurm.{key}.{name}: {value!r}: an option cannot hold a line break"
    given = [name for name, value in slurm.sbatch.items() if value not in (None, False)]
    for name in filter(_OPTION_NAME.fullmatch, given):
        # sbatch also takes an option by its first letters.
        taken = min((k for k in (*_RELIED_ON, *_READ_HERE) if k.startswith(name)), key=len, default=name)
        if taken in _WITHOUT_ANSWER:
            yield f"slurm.sbatch.{name}: submit needs the id of the job from sbatch, and at once: remove it (=null)"
        elif taken == "clusters":
            yield f"slurm.sbatch.{name}: `status` would not find the job; remove it, and submit from a login node of that cluster"
        elif taken == "time-min":
            yield f"slurm.sbatch.{name}: a requeue keeps the shortened limit; remove it (=null), or lower slurm.time_limit"
        elif taken in _RELIED_ON:
            use = f"use {_INSTEAD[taken]}" if taken in _INSTEAD else "the batch script relies on it; remove it"
            yield f"slurm.sbatch.{name}: --{taken} is set by submit; {use}"
        elif taken != name:
            yield f"slurm.sbatch.{name}: is short for --{taken}; write slurm.sbatch.{taken}"
    of_job = {"nodes": slurm.nodes, "ntasks-per-node": slurm.ranks_per_node, "cpus-per-task": slurm.cpus_per_rank}
    of_job["ntasks"] = slurm.nodes * slurm.ranks_per_node
    for name, value in slurm.srun.items():
        if name in _SRUN_KEYS and getattr(slurm, _SRUN_KEYS[name]):
            yield f"slurm.srun.{name}: slurm.{_SRUN_KEYS[name]} is given too; keep one of them"
        if value not in (None, False, ()) and str(value) != str(of_job.get(name, value)):
            yield f"slurm.srun.{name}: expected {of_job[name]}, as the job has, got {value}; use {_INSTEAD[name]}"
        if name == "export" and value and not re.search(r"\bALL\b", str(value), re.IGNORECASE):
            yield f"slurm.srun.export: expected ALL among {value}, as ranks need the variables of the job"
    for nodes in listed(slurm.sbatch.get("exclude") or ()):
        if not _NODES.fullmatch(str(nodes)):
            yield f"slurm.sbatch.exclude: {nodes!r}: expected nodes as Slurm names them: n7, or several as in 'n[1-3,7]'"
    memory = slurm.sbatch.get("mem")
    if memory and not re.fullmatch(r"\d+[KMGT]?", str(memory)):
        yield f"slurm.sbatch.mem: {memory!r}: expected a number with K, M, G or T: 120G"


def _container_problems(slurm: SlurmConfig, folders: list[Path]) -> Iterator[str]:
    if slurm.container_image is None:
        if slurm.container_mounts:
            yield "slurm.container_mounts: are given without slurm.container_image; give the image, or remove them"
        return
    if slurm.container_image.startswith("-") or not slurm.container_image:
        yield f"slurm.container_image: {slurm.container_image!r}: expected the path or address of an image"
    for mount in slurm.container_mounts:
        if not re.fullmatch(r"/[^,:\n]*(:/[^,:\n]*){0,1}(:[a-z+,]+)?", mount):
            yield f"slurm.container_mounts: {mount!r}: expected /folder, or /folder:/inside, without commas"
    for folder in folders:
        if re.search("[,:\n]", str(folder)):
            yield f"slurm.container_image: {str(folder)!r} must be seen inside, and cannot be with ',' or ':' in its name"
    if slurm.container_runtime == "apptainer" and any(o.startswith("container-") for o in slurm.srun):
        yield "slurm.srun: container-... is pyxis', but slurm.container_runtime is apptainer; keep one of them"


def _environment_problems(slurm: SlurmConfig) -> Iterator[str]:
    # Checked again here, because a cluster profile adds variables of its own.
    yield from (message for _, message in secret_problems({"slurm": slurm}))
    for name, value in slurm.environment.items():
        where = f"slurm.environment.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{where}: expected a variable's name: letters, digits and '_', no digit in front"
        elif _SET_BY_THE_JOB.fullmatch(name):
            yield f"{where}: is set by the batch script for each rank; remove it"
        if "\0" in value:
            yield f"{where}: a variable cannot hold a zero byte"
