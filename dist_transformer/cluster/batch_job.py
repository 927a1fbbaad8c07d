"""The work of the batch script of training, once its environment is set up (slurm/train.sbatch becomes this process).

    python -m dist_transformer.cluster.batch_job PREFLIGHT SECONDS TOLERANCE SPARE_NODES \\
        COUNT srun_option ... COUNT word_before_each_rank ... CONFIG_OR_RUN_FOLDER [section.key=value ...]

    preflight -> ranks -> decision -> ranks again, on the nodes of the job that answer
                                   -> requeue   -> the end

USR1 comes some time before the limit (--signal), or ranks get USR2 from here: they save and stop. TERM comes at the limit,
when a person cancels the job, when Slurm itself requeues it, and when the node shuts down; the ranks receive their own.
The job is one with --no-kill: a node that dies is taken from it and the others stay. If it is the node of this process,
`batch_host` requeues the job.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dist_transformer.cluster import requeue, slurm
from dist_transformer.cluster.requeue import Decision, How, NextNodes
from dist_transformer.cluster.silent_nodes import SilentNodes, nodes_that_answer
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR, MachineError, UserError, say
from dist_transformer.package_data import share_folder
from dist_transformer.run.excluded_nodes import exclude, reasons_of_preflight

TRIES = 60
RETRY_SECONDS = 5.0
"""A controller that is away is asked again for 5 minutes, a disk for 10."""
FAILED_SECONDS = 1.0
"""From a rank's failure to the question whether all nodes answer: srun ends in this time if they do."""
KILL_SECONDS = 1.0
"""For srun to kill the ranks on the nodes that answer."""
EXIT_EXCLUDE = 3
"""Exit code of launch/preflight.sh if there are nodes to exclude."""
WATCH_SECONDS = 2.0
"""From the start of ranks to that of the watch, which must not take the job's memory before them."""
NOT_FOR_FEWER_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_NTASKS",
                       "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")  # fmt: skip
"""Variables of the batch script from which srun would take the size of the whole job."""


@dataclass(frozen=True)
class Settings:
    """Settings of the batch script, and `train`, the arguments of the ranks' command."""

    preflight: str
    preflight_seconds: str
    preflight_tolerance: str
    spare_nodes: int
    srun_options: tuple[str, ...]
    rank_prefix: tuple[str, ...]
    train: tuple[str, ...]


class BatchJob:
    """One attempt of a job, from its start by Slurm to its requeue or its end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        array = os.environ.get("SLURM_ARRAY_JOB_ID")  # only this task of it is requeued
        self._job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
        self._launch = share_folder("launch")
        self._nodes = slurm.host_names(os.environ["SLURM_JOB_NODELIST"])
        self._num_ranks = int(os.environ.get("SLURM_NTASKS") or len(self._nodes))  # default: one per node
        self._wanted = max(1, len(self._nodes) - settings.spare_nodes)
        self._steps, self._stopped = 0, 0.0
        self._failed_on: list[str] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._watching_node = ""
        self._is_told = self._is_ended = self._has_term = False
        self._save_at = requeue.save_time(os.environ.get("SLURM_JOB_END_TIME", ""))  # since Slurm 23.02
        signal.signal(signal.SIGUSR1, self._tell_to_save)
        signal.signal(signal.SIGTERM, self._on_term)

    def run(self) -> int:
        """Runs the attempt; returns the exit code of the job."""
        self._begin()
        nodes = self._nodes[: self._wanted]
        if self._settings.preflight != "off":
            self._preflight()
        while not self._is_signalled():
            exit_code, failed_on = self._train(nodes)
            self._say(f"exit code {exit_code}" + (f", first on {failed_on}" if failed_on else ""))
            self._failed_on.append("" if self._stopped >= requeue.SUSPENDED_SECONDS else failed_on)
            nodes = self._finish(exit_code, "decide", nodes)
        self._finish(EXIT_REQUEUE, "decide", [])  # signalled meanwhile: there is nothing to save
        raise AssertionError("without nodes of ranks that failed the job ends")

    def _begin(self) -> None:
        """Records that the attempt begins; waits for a disk that is away."""
        for tries_left in reversed(range(TRIES)):
            try:
                self._run_dir = requeue.run_folder([*self._settings.train])
                requeue.begin(self._run_dir, self._job, self._attempt)
                return
            except OSError as error:
                if not tries_left or isinstance(error, PermissionError):
                    raise
                self._say(f"the run folder cannot be read or written; trying again: {error}")
            time.sleep(2 * RETRY_SECONDS)

    def _say(self, text: str) -> None:
        say(f"{time.strftime('%F %T')} job {self._job} attempt {self._attempt}: {text}", sys.stdout)

    def _tell_to_save(self, number: int, *_: object) -> None:
        if self._child is not None and not self._is_told:  # the same signal again would end the ranks at once
            self._child.send_signal(number)
        self._is_told = True
        self._say("told to save")

    def _on_term(self, *_: object) -> None:
        self._has_term = True

    def _is_signalled(self) -> bool:
        self._look_at_term()
        return self._is_told or self._is_ended

    def _look_at_term(self) -> None:
        if self._has_term:
            self._has_term = False
            reason = slurm.waiting_reason(self._job) or slurm.waiting_reason(self._job)  # an answer may come too late
            self._is_ended |= reason != "TimeLimit"
            if self._child is not None and not self._is_ended:
                self._say("ranks run on at the time limit; Slurm will kill those that hang, and this script with them")
                self._finish(128 + signal.SIGTERM, "decide", [])

    def _look_at_end(self) -> None:
        """Tells the ranks to save where no signal has come. An end that was moved since it was known counts where it is."""
        if not self._is_told and time.time() >= self._save_at:
            with suppress(SlurmError):
                self._save_at = requeue.save_time(slurm.job_record(self._job).get("EndTime", ""))
            if time.time() >= self._save_at:
                self._tell_to_save(signal.SIGUSR2)  # a person may just have sent USR1 to the ranks alone

    def _leave(self, exit_code: int, text: str = "") -> NoReturn:
        if text:
            self._say(text)
        if self._watch is not None:
            self._watch.terminate()
        sys.exit(exit_code)

    def _wait_for(self, command: Sequence[str], environment: dict[str, str], is_lost: Callable[[], bool]) -> int:
        """Runs a command and returns its exit code as a shell does; kills it once `is_lost`, asked often, says so."""
        try:
            self._child = child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        except OSError as error:  # no memory or process left
            self._say(f"{command[0]} cannot be started: {error}")
            return EXIT_FAILED
        if self._is_told:
            child.send_signal(signal.SIGUSR1)
        while (code := child.poll()) is None:
            self._look_at_term()
            self._look_at_end()
            if is_lost():
                child.terminate()  # it kills the ranks that it reaches, and would wait for the others
                with suppress(subprocess.TimeoutExpired):
                    child.wait(KILL_SECONDS)
                child.kill()
            turn = time.monotonic()  # of the sleep alone: Slurm and the disk may take their time to answer
            time.sleep(0.1)
            self._stopped = max(self._stopped, time.monotonic() - turn)
        self._child = None
        self._look_at_term()
        return code if code >= 0 else 128 - code

    def _environment(self, nodes: Sequence[str]) -> dict[str, str]:
        is_whole = len(nodes) == len(self._nodes)
        kept = {name: v for name, v in os.environ.items() if is_whole or name not in NOT_FOR_FEWER_NODES}
        if cpus := kept.get("SLURM_CPUS_PER_TASK"):  # srun does not inherit it from sbatch
            kept |= {"SRUN_CPUS_PER_TASK": cpus, "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", cpus)}
        if is_whole:
            kept["SLURM_NTASKS"] = str(self._num_ranks)
        kept.setdefault("NCCL_DEBUG", "WARN")  # its faults, which its errors do not name
        kept["DIST_TRANSFORMER_KEEP_STOP"] = "1"  # the file of `stop` counts, even if it was made while the job waited
        # Below the kernel's ephemeral ports; ranks of the step before may hold theirs.
        port = 10000 + (int(kept["SLURM_JOB_ID"]) * 7 + self._attempt + 11 * self._steps) % 20000
        given = os.environ.get("MASTER_ADDR") if nodes[0] == self._nodes[0] else None  # by slurm.setup, on that node
        return {**kept, "MASTER_ADDR": given or slurm.address_of(nodes[0]), "MASTER_PORT": str(port)}

    def _preflight(self) -> None:
        """Measures the nodes; requeues the job away from bad ones if it is to."""
        given, folder = self._settings, self._run_dir.slurm / "preflight" / f"{self._job}-{self._attempt}"
        command = [self._launch / "preflight.sh", sys.executable, self._run_dir.path, folder, given.preflight_seconds]
        command += [given.preflight_tolerance, *given.srun_options, "--", *given.rank_prefix]
        found = self._wait_for([*map(str, command)], self._environment(self._nodes), lambda: False)
        if given.preflight == "exclude" and found == EXIT_EXCLUDE:
            added = dict[str, str]()
            with suppress(OSError, MachineError):  # training finds out whether the disk is away
                reasons = reasons_of_preflight(folder / "report.json")
                others = slurm.num_similar_nodes(self._job, self._nodes)
                added = exclude(self._run_dir, reasons, len(self._nodes), others)
            for node, reason in added.items():
                say(f"excluded: {node}: {reason}", sys.stdout)
            if added:
                self._finish(EXIT_REQUEUE, "preflight", [])

    def _train(self, nodes: Sequence[str]) -> tuple[int, str]:
        """Runs the ranks on these nodes. Returns their exit code, and the node on which a rank failed first."""
        given, environment = self._settings, self._environment(nodes)
        first_exit = self._run_dir.slurm / f"first_exit_{self._job}-{self._attempt}.{self._steps}"
        environment["DIST_TRANSFORMER_FIRST_EXIT"] = str(first_exit)
        is_whole, num_ranks, size, self._stopped = len(nodes) == len(self._nodes), self._num_ranks, [], 0.0
        if not is_whole:
            per_node = self._num_ranks // len(self._nodes)
            num_ranks = per_node * len(nodes)
            size = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]
            size += [f"--ntasks={num_ranks}", f"--ntasks-per-node={per_node}"]
        if self._steps:
            size.append("--overlap")  # the step before may not have ended on a node that does not answer
            with suppress(OSError):  # without the record, but the ranks start
                requeue.note_begin(self._run_dir, self._job, self._attempt, ",".join(nodes), num_ranks)
        self._say(f"{num_ranks} ranks on {','.join(nodes)}, run folder {self._run_dir.path}")
        command = ["srun", "--kill-on-bad-exit=1", "--wait=0", "--label", *size, *given.srun_options]
        command += [*given.rank_prefix, str(self._launch / "slurm_task.sh"), "train", *given.train]
        code = self._wait_for(command, environment, self._lost_nodes_of(nodes, first_exit))
        self._steps += 1
        return requeue.first_failure(first_exit) or (requeue.exit_without_failure(self._run_dir, code), "")

    def _lost_nodes_of(self, nodes: Sequence[str], first_exit: Path) -> Callable[[], bool]:
        """A function that says whether nodes do not answer any more, for which Slurm would hold up the others for minutes."""
        asked, watched = 0.0, time.monotonic() + WATCH_SECONDS  # when next
        silent = SilentNodes(nodes)

        def is_lost() -> bool:
            nonlocal asked, watched
            if time.monotonic() > watched:
                watched = time.monotonic() + 10.0  # it may have ended
                self._watch_this_node(nodes)
            if lost := silent.found():
                self._say(f"no answer from {', '.join(lost)}")
                return True
            failure = requeue.first_failure(first_exit) if len(nodes) > 1 else None
            if failure is None or failure[0] in (EXIT_USER_ERROR, EXIT_REQUEUE):
                return False
            asked = asked or time.monotonic() + FAILED_SECONDS
            if time.monotonic() < asked:
                return False
            asked = time.monotonic() + 5.0
            with suppress(SlurmError):
                return len(nodes_that_answer(nodes)) < len(nodes)
            return False

        return is_lost

    def _watch_this_node(self, nodes: Sequence[str]) -> None:
        """Has another node of the job requeue it if this one dies, with this process: Slurm does that for one node alone."""
        if len(nodes) < 2 or (self._watch and self._watching_node in nodes and self._watch.poll() is None):
            return
        if self._watch is not None:
            self._watch.terminate()
        node = next(node for node in nodes[::-1] if node != os.environ.get("SLURMD_NODENAME"))
        module = ["dist_transformer.cluster.batch_host", self._job, str(self._attempt), str(self._run_dir.path)]
        command = slurm.step_beside_ranks(1, [f"--nodelist={node}", sys.executable, "-m", *module])
        environment = {name: v for name, v in os.environ.items() if name not in NOT_FOR_FEWER_NODES}
        # Its end is no news: srun would report that of each job's in the log as if a rank had been killed.
        null = subprocess.DEVNULL
        with suppress(OSError):  # no memory or process left: tried again
            self._watch = subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=null)
            self._watching_node = node

    def _ask_slurm(self) -> dict[str, str] | None:
        """Slurm's record of the job, once that is not suspended; None without an answer. Leaves if Slurm has started the job
        elsewhere, because this node was cut off the network."""
        try:
            while (record := slurm.job_record(self._job)).get("JobState") == "SUSPENDED":
                time.sleep(RETRY_SECONDS)  # until this process is stopped: Slurm would hold what is requeued now
        except SlurmError as error:
            say(error)
            return None
        if record.get("Restarts") != str(self._attempt):
            self._leave(EXIT_FAILED, "is not this attempt's any more")
        return record

    def _finish(self, exit_code: int, how: How, before: Sequence[str]) -> list[str]:
        """Decides what follows, and requeues or ends the job; returns the nodes if ranks start again, on those.

        Waits for a disk that is not mounted: without it there is no decision. `before`: nodes of the ranks that ended.
        """
        for _ in range(TRIES):
            self._look_at_term()
            if self._is_ended:
                how = self._who_ended_it()
            record, left = self._ask_slurm() if how in ("decide", "preflight") else None, None
            if record and how == "decide" and exit_code not in (EXIT_DONE, EXIT_USER_ERROR, EXIT_REQUEUE):
                left = self._next_nodes(record, before)
            try:
                noted: How = "barred" if record and record.get("Requeue") == "0" else how
                decision = requeue.end(self._run_dir, self._job, self._attempt, exit_code, noted, left, self._stopped)
            except (MachineError, OSError) as error:
                say(error)
                self._say(f"{self._run_dir.path}: cannot be asked whether to requeue; trying again")
                time.sleep(2 * RETRY_SECONDS)
                continue
            return self._follow(decision, exit_code, record or {}, left)
        self._leave(exit_code)

    def _follow(self, decision: Decision, exit_code: int, record: dict[str, str], left: NextNodes | None) -> list[str]:
        words = {"stop": "not requeued:", "requeue": "requeued:", "again": "ranks start again"}
        say(f"{words[decision.then]} {decision.reason}", sys.stdout)
        if decision.then == "stop" and self._child is None:  # else the ranks may still save
            self._tell_mlflow(20)
            self._leave(exit_code)
        if decision.then == "requeue":
            # After 75 the ranks have reported it; once Slurm ends this process nothing may delay the requeue.
            if exit_code != EXIT_REQUEUE and record.get("JobState", "RUNNING") == "RUNNING":
                self._tell_mlflow(5)
            self._requeue()
        return [*left.nodes] if decision.then == "again" and left is not None else []

    def _who_ended_it(self) -> How:
        """A person who cancelled the job; Slurm, which has already counted the next attempt, as at pre-emption; or nobody:
        a job that still runs has lost its ranks to the shutdown of this node. Requeued like others, as is a pre-empted one."""
        with suppress(SlurmError):
            record = slurm.job_record(self._job)
            if record.get("Restarts") == str(self._attempt):
                return "cancelled" if slurm.is_cancelled(record) else "decide"
        return "ended"

    def _next_nodes(self, record: dict[str, str], before: Sequence[str]) -> NextNodes | None:
        if self._is_signalled() or record.get("JobState") != "RUNNING" or self._num_ranks % len(self._nodes):
            return None
        try:
            of_job = slurm.host_names(record["NodeList"])
            answering = nodes_that_answer(of_job)
        except (SlurmError, KeyError):
            return None
        if not {*before} <= {*answering}:
            self._failed_on[-1] = ""  # ranks fail first on a node that is left, as one that died says nothing
        suspects = {node for node in self._failed_on[-2:-1] if node == self._failed_on[-1]}
        return requeue.next_nodes(before, of_job, answering, suspects, self._wanted)

    def _tell_mlflow(self, seconds: int) -> None:
        """Reports to MLflow what the ranks could not report themselves, and the state of the job."""
        command = [sys.executable, "-m", "dist_transformer", "track", "end", str(self._run_dir.path)]
        command += ["--job", self._job, "--attempt", str(self._attempt), "--seconds", str(seconds)]
        try:
            subprocess.run(command, timeout=seconds + 30, check=False, stdin=subprocess.DEVNULL)
        except (subprocess.TimeoutExpired, OSError):
            self._say("MLflow was not told of the end: no answer, or no memory or process left")

    def _requeue(self) -> None:
        """Requeues the job, without the nodes that the run excludes, and leaves at once, as Slurm keeps the nodes until this
        process has ended, but for ranks at their time limit, which may still save. TERM, by which Slurm ends it, is ignored
        from the requeue on, because Slurm changes the excluded nodes only of a job that no longer runs."""
        for _ in range(TRIES):  # the controller may be down for a while
            if (record := self._ask_slurm()) is not None:
                excluded = requeue.nodes_to_exclude(self._run_dir, record.get("ExcNodeList", ""))
                if slurm.is_cancelled(record):
                    self._leave(EXIT_FAILED, "was cancelled")  # Slurm would also requeue a job that is
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                try:
                    slurm.requeue_job(self._job)
                    break
                except SlurmError as error:
                    say(error)
                    signal.signal(signal.SIGTERM, self._on_term)
            time.sleep(RETRY_SECONDS)
        else:
            self._leave(EXIT_FAILED, "could not be requeued; submit it again")
        if excluded:
            slurm.exclude_nodes(self._job, excluded)
        self._is_ended = True
        if self._child is None:
            self._leave(EXIT_FAILED)


def read_settings(arguments: Sequence[str]) -> Settings:
    """The settings from the arguments of the command."""
    preflight, seconds, tolerance, spare, count, *rest = arguments
    options, (prefix_count, *rest) = rest[: int(count)], rest[int(count) :]
    prefix, train = rest[: int(prefix_count)], rest[int(prefix_count) :]
    return Settings(preflight, seconds, tolerance, int(spare), tuple(options), tuple(prefix), tuple(train))


def main(arguments: list[str]) -> int:
    """Runs the attempt and returns the exit code."""
    try:
        return BatchJob(read_settings(arguments)).run()
    except UserError as error:
        say(error)
        return error.exit_code
    except OSError as error:
        say(f"the run folder cannot be read or written: {error}")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
