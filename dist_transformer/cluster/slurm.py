"""Adapter of Slurm's commands, which nothing else calls. Arguments are passed as lists, never through a shell.

Every call raises SlurmError with the command's own message, unless it says otherwise.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dist_transformer.errors import MachineError, UserError

STACKS_SECONDS = 60
"""Time limit for the answers of a job's nodes: a dead node never answers."""

_UP = r"(idle|alloc|mix|comp|resv|plnd)[^*]*"
"""States of nodes that take jobs, now or later; a star marks one that does not answer."""

_OF_A_USER = re.compile(r"SLURM_(CONF|CONF_SERVER|JWT)|SBATCH_(ACCOUNT|CONSTRAINT|PARTITION|QOS|RESERVATION|WCKEY)")
"""Variables that say where Slurm is and who asks, and defaults of options that submit does not set itself."""
_OF_JOBS = re.compile(
    r"(SLURM|SRUN|SBATCH|MASTER|DIST_TRANSFORMER)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
)

REFUSED = "change slurm (nodes, time_limit, cpus_per_rank, gpus_per_node), slurm.sbatch (partition, qos, mem, gres); see sinfo"
_REFUSALS = {
    "Unable to contact": "the controller does not answer: submit again later",
    "temporarily un": "the queue is full (MaxJobCount), or the controller busy: submit again when jobs have ended",
    "configuration (source|file)": "sbatch has no configuration: correct SLURM_CONF, or submit from a login node",
    "submit limit": "submit again when jobs of yours have ended, or ask for less (slurm.nodes, time_limit) or for another QOS",
    "Invalid (account|qos)": "correct slurm.sbatch (account, partition, qos): `sacctmgr show assoc user=$USER`",
    "Invalid feature|equested reservation": "correct slurm.sbatch (constraint, reservation): see sinfo, `scontrol show res`",
    "parameter too long": "choose a shorter run.root (Slurm takes about 1,000 bytes), or shorten what is long in slurm.sbatch",
    "Invalid node name": "correct slurm.sbatch (exclude, nodelist); if RUN/slurm/excluded.json has a lost node, delete it",
}


class SlurmError(UserError):
    """A command of Slurm is missing or failed."""


class PerhapsSubmitted(MachineError):
    """The answer of sbatch has no id: the job may exist, and its files must stay."""


def submit_script(arguments: Sequence[str]) -> str:
    """Runs `sbatch` (its argv without the program) and returns the job id. Raises PerhapsSubmitted, too: sbatch printed no
    id, or no answer came in time."""
    refusal: SlurmError | None = None
    try:
        answer = _call(["sbatch", *arguments], clean_environment(os.environ))
    except _PartOfAnAnswer as error:
        answer, refusal = "\n".join(error.lines), error
    except KeyboardInterrupt:
        answer = "^C"
    # --parsable: "id" or "id;cluster". A site's wrapper may print more, before or after it.
    found = re.findall(r"^(\d+)(?:;\S+)?$", answer, re.MULTILINE)
    if len(found) == 1:
        return str(found[0])
    if refusal is not None and "Socket timed out" not in str(refusal):
        advice = next((advice for words, advice in _REFUSALS.items() if re.search(words, str(refusal))), REFUSED)
        raise SlurmError(f"{refusal}\n  {advice}")
    said = str(refusal or answer).partition("\n  command:")[0].strip()
    look = "look with `squeue --me` whether the job is there, end it with scancel, and submit again"
    raise PerhapsSubmitted(f"Slurm may have the job, but sbatch answered {said!r}: expected a job id; {look}")


def list_jobs(job_ids: Sequence[str], format_string: str) -> list[str]:
    """One line of `squeue` for each job and each task of an array, ended ones too; none for jobs that Slurm has
    forgotten and for text that is no job id. Times are unix seconds.
    """
    known = [job_id for job_id in job_ids if is_job_id(job_id)]
    if not known:  # with an empty list squeue would list everybody's jobs
        return []
    # Without --array pending tasks share one line, 12_[3-9], in which none is found by its id.
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(known)}"]
    try:
        return _lines(_call([*command, f"--format={format_string}"]))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise


def list_accounted_jobs(job_id: str, fields: str) -> list[str]:
    """One line of `sacct` for each part of the job, fields separated by "|", times as unix seconds.

    Empty where there is no accounting, or where it does not answer in time: it is optional, and nothing relies on it.
    """
    with suppress(SlurmError):
        command = ["sacct", "--allocations", "--parsable2", "--noheader", f"--jobs={_checked(job_id)}"]
        return _lines(_call([*command, f"--format={fields}"], seconds=15))  # where its database hangs it takes 40
    return []


def cancel_job(job_id: str) -> None:
    """Cancels a job, whether it runs or waits. (`scancel` accepts unknown jobs.)"""
    # No --state=PENDING: with it Slurm 22.05 treats 12_3 as all tasks that wait together with it.
    _call(["scancel", _checked(job_id)])


def release_job(job_id: str) -> None:
    """Releases a held job; one that an administrator holds is refused."""
    _call(["scontrol", "release", _checked(job_id)])


def job_record(job_id: str) -> dict[str, str]:
    """The record of a job of the controller: Restarts, JobState, Reason, NodeList, BatchHost, ExcNodeList ..."""
    return _fields(_call(["scontrol", "--oneliner", "show", "job", _checked(job_id)]))


def is_cancelled(record: Mapping[str, str]) -> bool:
    """True if a person has ended the job: it neither runs nor is suspended, nor at its limit, nor was pre-empted (CANCEL)."""
    preempted, ended = record.get("PreemptTime", ""), record.get("EndTime", "")  # the first stays after a suspension
    is_preempted = preempted.isdecimal() and ended.isdecimal() and abs(int(ended) - int(preempted)) < 5
    is_there = record.get("JobState") in ("RUNNING", "SUSPENDED")
    return not is_there and record.get("Reason") != "TimeLimit" and not is_preempted


def waiting_reason(job_id: str) -> str:
    """The reason that squeue shows for a job; empty without an answer."""
    with suppress(SlurmError):
        return _call(["squeue", "--noheader", "--jobs", _checked(job_id), "--format", "%r"]).strip()
    return ""


def requeue_job(job_id: str) -> None:
    """Puts a running job back into the queue; its ranks and its batch script are ended."""
    _call(["scontrol", "requeue", _checked(job_id)])


def exclude_nodes(job_id: str, nodes: str) -> None:
    """Replaces the nodes that a requeued job must not get. Slurm refuses that until it no longer runs: tried for 6 seconds,
    without an error."""
    for _ in range(20):
        with suppress(SlurmError):
            _call(["scontrol", "update", f"JobId={_checked(job_id)}", f"ExcNodeList={nodes}"])
            return
        time.sleep(0.3)


def node_addresses(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Address and port of the daemon of each node; where PrivateData hides them its name and SlurmdPort, if this node's are."""
    port = re.search(r"^SlurmdPort\s*=\s*(\d+)", _call(["scontrol", "show", "config"]), re.MULTILINE)
    default = int(port[1]) if port else 6818
    try:
        lines = _call(["scontrol", "--oneliner", "show", "node", ",".join(nodes)]).splitlines()
    except SlurmError as error:
        with suppress(OSError, KeyError):
            if "denied" in str(error):  # a wrong place would make a live node a silent one
                socket.create_connection((os.environ["SLURMD_NODENAME"], default), 2.0).close()
                return {node: (node, default) for node in nodes}
        raise
    found = [_fields(line) for line in lines if line.startswith("NodeName=")]
    return {node["NodeName"]: (node["NodeAddr"], int(node.get("Port", default))) for node in found}


def address_of(node: str) -> str:
    """The name of a node if it is known here: it may lead to a faster network than NodeAddr, which is else returned."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        with suppress(SlurmError, KeyError):
            return node_addresses([node])[node][0]
    return node


def similar_nodes(partition: str, node: str) -> list[str]:
    """Nodes of a partition that are up, with the features and generic resources of `node`; itself, too."""
    command = ["sinfo", "--noheader", "--Node", "--format", "%N|%t|%f|%G"]
    command += ["--partition", partition] if partition else []
    rows = {tuple(line.split("|", 2)) for line in _call(command).splitlines()}
    like = {kind for name, _, kind in rows if name == node}
    return sorted(name for name, state, kind in rows if kind in like and re.fullmatch(_UP, state))


def num_similar_nodes(job_id: str, nodes: Sequence[str]) -> int:
    """Number of further nodes like those of this job that are up and not excluded yet; 0 without an answer."""
    with suppress(SlurmError):
        given = job_record(job_id).get("ExcNodeList", "(null)")
        excluded = [] if given == "(null)" else host_names(given)
        similar = similar_nodes(os.environ.get("SLURM_JOB_PARTITION", ""), nodes[0])
        return max(0, len({*similar} - {*excluded}) - len(nodes))
    return 0


def host_names(node_list: str) -> list[str]:
    """Expands n[1-2] to n1, n2."""
    return _call(["scontrol", "show", "hostnames", node_list]).split()


def run_on_each_node(job_id: str, num_nodes: int, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Runs a command once on each node of a running job, beside its ranks; returns the lines within STACKS_SECONDS, which
    are no error if any came.

    Args:
        job_id: the plain number, also for a task of an array.
        environment: added to the environment of this process.
    """
    full = step_beside_ranks(num_nodes, [f"--jobid={_checked(job_id)}", *command])
    kept = {name: value for name, value in _asking_environment().items() if name != "SLURM_JWT"}  # srun takes none
    try:
        return _call(full, {**kept, **environment}, STACKS_SECONDS).splitlines()
    except _PartOfAnAnswer as error:
        if not error.lines:
            raise
        return error.lines


def step_beside_ranks(num_nodes: int, command: Sequence[str]) -> list[str]:
    """The job step that runs a command, with options of srun in front, once on each of so many nodes beside the ranks."""
    # Without --overlap the step would wait for the ranks to end; it does not need other steps' plugins and bindings.
    options = ["--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    return ["srun", *options, "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", *command]


def is_job_id(value: Any) -> bool:
    """True if `value` is a string like 123 or 123_4."""
    return isinstance(value, str) and re.fullmatch(r"\d+(_\d+)?", value, re.ASCII) is not None


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of a job, node or rank that `submit` runs in; the job would inherit them."""
    return {n: v for n, v in environment.items() if _OF_A_USER.fullmatch(n) or not _OF_JOBS.fullmatch(n)}


def _fields(line: str) -> dict[str, str]:
    """The fields Name=value of a line of scontrol. Users' own words, which may look like one, are a job's name and what
    comes at its end."""
    line = re.sub(r" JobName=.*? UserId=", " UserId=", line, count=1)
    return dict(reversed(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line)))  # of a name that comes twice the first


def _checked(job_id: str) -> str:
    if not is_job_id(job_id):
        raise SlurmError(f"{job_id!r}: expected a job id, 123 or 123_4; give the one that squeue shows")
    return job_id


def _asking_environment() -> dict[str, str]:
    """Environment without the user's filters and formats (SQUEUE_STATES, SACCT_FORMAT ...); times as unix seconds."""
    theirs = ("SQUEUE_", "SACCT_", "SCANCEL_")
    kept = {name: value for name, value in clean_environment(os.environ).items() if not name.startswith(theirs)}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


def _lines(text: str) -> list[str]:
    """Lines of an answer; the path of a run folder in one may contain what `splitlines` takes for the end of a line."""
    return text.removesuffix("\n").split("\n") if text else []


class _PartOfAnAnswer(SlurmError):
    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines


def _call(command: list[str], environment: Mapping[str, str] | None = None, seconds: float | None = None) -> str:
    """Runs a command, in the environment of questions unless another is given, and returns what it prints."""
    called, environment = f"\n  command: {' '.join(command)}", environment or _asking_environment()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False, timeout=seconds
        )
    except OSError as error:
        what = "not found" if isinstance(error, FileNotFoundError) else f"cannot be run ({error.strerror})"
        raise SlurmError(f"{command[0]}: {what}; run this where Slurm's commands are on PATH: a login node") from None
    except subprocess.TimeoutExpired as late:
        said: str | bytes = late.stdout or b""  # bytes even with text=True (cpython #87597)
        lines = (said if isinstance(said, str) else said.decode(errors="replace")).splitlines()
        raise _PartOfAnAnswer(f"{command[0]}: no answer within {seconds:g} s{called}", lines) from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise _PartOfAnAnswer(f"{command[0]} refused: {words}{called}", done.stdout.splitlines())
    return done.stdout
