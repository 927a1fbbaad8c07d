"""What the batch script does between Slurm's start of the job and its end, with programs that answer like Slurm's."""

import contextlib
import errno
import os
import re
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from running import with_constants

from dist_transformer.cluster import silent_nodes
from dist_transformer.cluster.batch_host import TRIES, watch
from dist_transformer.cluster.requeue import note_begin
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import records_of

RECORD = (
    "JobId=7 JobName=a Restarts=9 b UserId=u(0) JobState=RUNNING Reason=None Restarts=0 NodeList=n[1-2] BatchHost=n1 "
    "ExcNodeList=(null)"
)
SCONTROL = """case "$*" in
*hostnames*) for node in {nodes}; do echo $node; done ;;
*"show job"*) cat {folder}/job ;;
*config*) echo "SlurmdPort = 6818" ;;
*"show node"*) cat {folder}/nodes ;;
esac"""
SRUN = """case "$*" in *batch_host*) exec sleep 60 ;; esac
echo "$*" >> {folder}/steps
exec bash {folder}/step_$(wc -l < {folder}/steps)"""
FAILS = 'echo "1 n2" > $DIST_TRANSFORMER_FIRST_EXIT; exit 137'


class SilentPort:
    """A port that gives no answer, as if its machine were gone: the queue of those who wait for it is full."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = self._server.getsockname()
        self._waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(self.address)
            self._waiting.append(client)

    def close(self) -> None:
        for each in (*self._waiting, self._server):
            each.close()


class Slurm:
    """Two nodes, n1 and n2; the job is 7. What srun does the first time, the second ... is in files step_1, step_2."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, RunDir(folder / "run")
        self.run_dir.path.mkdir()
        self.run_dir.config.write_text("data: {train: {demo: train}}\n")
        self.listening, self.silent = socket.create_server(("127.0.0.1", 0)), SilentPort()
        self.programs = {"scontrol": SCONTROL.format(nodes="n1 n2", folder=folder), "srun": SRUN.format(folder=folder),
                         "squeue": "cat {folder}/reason", "sinfo": ""}  # fmt: skip
        self.answers("n1", "n2")
        (folder / "job").write_text(RECORD)

    def answers(self, *nodes: str) -> None:
        """Their daemons accept connections; those of the other nodes give no answer."""
        up, down = self.listening.getsockname()[1], self.silent.address[1]
        lines = [f"NodeName={n} NodeAddr=127.0.0.1 Port={up if n in nodes else down}\n" for n in ("n1", "n2")]
        (self.folder / "nodes").write_text("".join(lines))

    def start(
        self, *steps: str, spare: int = 0, log: int = subprocess.PIPE, python: Path = Path(sys.executable),
        programs: str = "/usr/bin:/bin",
    ) -> "subprocess.Popen[str]":  # fmt: skip
        for number, step in enumerate(steps, 1):
            (self.folder / f"step_{number}").write_text(step)
        for name, body in self.programs.items():
            path = self.folder / name
            path.write_text(
                f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{body}\n'.replace("{folder}", str(self.folder))
            )
            path.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1"}
        waits = {"batch_job.RETRY_SECONDS": 0.1, "batch_job.WATCH_SECONDS": 0.1, "silent_nodes.SILENT_SECONDS": 1}
        constants = with_constants({f"cluster.{name}": seconds for name, seconds in waits.items()})
        if python != Path(sys.executable):
            constants["PYTHONPATH"] += os.pathsep + os.pathsep.join(site.getsitepackages())
        main = "import sys; from dist_transformer.cluster.batch_job import main; sys.exit(main(sys.argv[1:]))"
        settings = ["off", "180", "0.8", str(spare), "1", "--mpi=none", "0"]
        return subprocess.Popen(
            [python, "-u", "-c", main, *settings, str(self.run_dir.path)],
            env={**kept, **slurm, **constants, "PATH": f"{self.folder}:{programs}"},
            stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *steps: str, spare: int = 0) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*steps, spare=spare)
        said = process.communicate(timeout=240)[0]
        assert "Traceback" not in said
        return process.returncode, said

    def calls(self, words: str) -> int:
        return sum(words in line for line in (self.folder / "calls").read_text().splitlines())

    def steps(self) -> list[str]:
        return [line.split(" /")[0] for line in (self.folder / "steps").read_text().splitlines()]

    def ends(self) -> list[tuple[Any, ...]]:
        records = [*records_of(self.run_dir.attempts.read_text().splitlines())]
        return [(r.get("exit_code"), r["how"], r["requeued"]) for r in records if r["event"] == "ended"]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tmp_path)
    yield made
    made.listening.close()
    made.silent.close()


ALL = "--kill-on-bad-exit=1 --wait=0 --label"


def test_a_run_that_ends_well_ends_the_job(slurm: Slurm) -> None:
    code, said = slurm.run("exit 0")
    assert (code, slurm.steps()) == (0, [f"{ALL} --mpi=none"])
    assert "not requeued: done" in said
    assert slurm.calls("scontrol requeue") == 0


@pytest.mark.parametrize(("given", "addresses"), [("ib-n1", ["ib-n1", "127.1"]), ("", ["127.0.0.1", "127.1"])])
def test_ranks_meet_where_setup_says_or_where_the_first_node_is_known(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, given: str, addresses: list[str]
) -> None:
    """n1 and n2 are names of Slurm alone. A start without n1 does not meet at the address that was given for it."""
    monkeypatch.setenv("MASTER_ADDR", given)
    nodes = slurm.folder / "nodes"
    nodes.write_text(nodes.read_text().replace("NodeName=n2 NodeAddr=127.0.0.1", "NodeName=n2 NodeAddr=127.1"))
    told = f"echo $MASTER_ADDR >> {slurm.folder}/told; "
    on_n1 = FAILS.replace("n2", "n1")
    slurm.run(told + on_n1, told + on_n1, f"{told}exit 0")
    first, second, third = (slurm.folder / "told").read_text().splitlines()
    assert (first, second, third) == (addresses[0], addresses[0], addresses[1])


def test_a_mistake_of_a_user_ends_the_job_and_a_2_of_srun_itself_does_not(slurm: Slurm) -> None:
    assert slurm.run('echo "2 n1" > $DIST_TRANSFORMER_FIRST_EXIT; exit 137')[0] == 2
    assert slurm.calls("scontrol requeue") == 0
    (slurm.folder / "steps").unlink()
    (slurm.run_dir.slurm / "first_exit_7-0").unlink()
    slurm.run("exit 2", "exit 0")
    assert slurm.ends() == [(2, "decide", False), (1, "decide", False), (0, "decide", False)]


def test_ranks_that_srun_says_nothing_of_count_by_their_own_exit_code(slurm: Slurm) -> None:
    """It ends with 0 if Slurm takes the node of a rank."""
    slurm.run('echo "75 n1" > $DIST_TRANSFORMER_FIRST_EXIT; exit 0')
    assert slurm.ends() == [(75, "decide", True)]


def test_ranks_that_fail_start_again_at_once_and_without_a_new_checkpoint_the_job_is_requeued(slurm: Slurm) -> None:
    code, said = slurm.run(FAILS, FAILS.replace("n2", "n1"))
    assert code == 1
    assert slurm.steps() == [f"{ALL} --mpi=none", f"{ALL} --overlap --mpi=none"]
    assert "exit code 1, first on n2" in said
    assert "ranks start again on n1, n2: begins again" in said
    assert slurm.calls("scontrol requeue 7") == 1
    assert slurm.ends() == [(1, "decide", False), (1, "decide", True)]


def test_a_job_that_slurm_may_not_requeue_ends_at_once(slurm: Slurm) -> None:
    (slurm.folder / "job").write_text(RECORD.replace("Restarts=0", "Requeue=0 Restarts=0"))
    code, said = slurm.run(FAILS, "exit 75")  # ranks start again, as ever
    assert (code, slurm.calls("scontrol requeue"), slurm.calls("srun")) == (75, 0, 2)
    assert (
        f"not requeued: requeues are disabled for this job: `dist-transformer resume {slurm.run_dir.path}`, and" in said
    )
    assert slurm.ends() == [(1, "barred", False), (75, "barred", False)]


def test_a_node_that_gives_no_answer_is_left_out(slurm: Slurm) -> None:
    slurm.answers("n1")
    code, said = slurm.run(f"{FAILS.split(';')[0]}; exec sleep 300", "exit 0")  # srun waits for the dead node
    assert (code, slurm.steps()[1:]) == (
        0, [f"{ALL} --nodelist=n1 --nodes=1 --ntasks=2 --ntasks-per-node=2 --overlap --mpi=none"],
    )  # fmt: skip
    assert "ranks start again on n1 (n2 gives no answer)" in said


def test_a_node_on_which_ranks_fail_twice_is_left_out(slurm: Slurm) -> None:
    code, said = slurm.run(FAILS, FAILS, "exit 0")
    assert code == 0
    assert "ranks start again on n1 (ranks failed on n2 twice)" in said
    assert "--nodelist=n1" in slurm.steps()[-1]


def test_a_node_that_outlived_another_is_not_suspected(slurm: Slurm) -> None:
    """Its ranks fail first, because the others are gone."""
    both = slurm.folder / "both"
    both.write_text((slurm.folder / "nodes").read_text())
    slurm.answers("n1")
    on_n1 = FAILS.replace("n2", "n1")
    code, said = slurm.run(on_n1, f"cp {both} {slurm.folder}/nodes; {on_n1}")
    assert "ranks start again on n1 (n2 gives no answer)" in said
    assert "failed on n1 twice" not in said
    assert (code, slurm.ends()) == (1, [(1, "decide", False), (1, "decide", True)])


def test_a_spare_node_takes_the_place_of_one_that_gives_no_answer(slurm: Slurm) -> None:
    size = "--nodelist={} --nodes=1 --ntasks=2 --ntasks-per-node=2"
    slurm.answers("n2")
    slurm.run(FAILS, "exit 0", spare=1)
    sizes = [size.format("n1"), f"{size.format('n2')} --overlap"]
    assert slurm.steps() == [f"{ALL} {each} --mpi=none" for each in sizes]


def test_what_is_told_to_save_is_told_by_srun_and_requeued(slurm: Slurm) -> None:
    process = slurm.start("trap 'echo saved; exit 75' USR1; touch $0.up; while :; do sleep 0.1; done")
    _wait_for(slurm.folder / "step_1.up")
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=240)[0]
    assert "told to save" in said
    assert "saved" in said
    assert slurm.ends() == [(75, "decide", True)]
    assert slurm.calls("scontrol requeue 7") == 1


def test_a_log_that_takes_no_more_writes_costs_neither_the_save_nor_the_requeue(slurm: Slurm) -> None:
    with Path("/dev/full").open("w") as full:
        process = slurm.start("trap 'exit 75' USR1; touch $0.up; while :; do sleep 0.1; done", log=full.fileno())
    _wait_for(slurm.folder / "step_1.up")
    process.send_signal(signal.SIGUSR1)
    process.wait(240)
    assert slurm.ends() == [(75, "decide", True)]
    assert slurm.calls("scontrol requeue 7") == 1


def test_a_disk_that_is_away_at_the_start_is_waited_for(slurm: Slurm) -> None:
    slurm.run_dir.slurm.write_text("no folder")
    process = slurm.start("exit 0")
    assert process.stdout is not None
    assert "the run folder cannot be read or written; trying again" in process.stdout.readline()
    slurm.run_dir.slurm.unlink()
    process.communicate(timeout=240)
    assert (process.returncode, slurm.ends()) == (0, [(0, "decide", False)])


def test_programs_that_cannot_be_started_end_no_job_that_is_to_be_requeued(slurm: Slurm) -> None:
    """The watch of this node, the ranks' second start, and the report to MLflow."""
    python = slurm.folder / "python"
    python.symlink_to(sys.executable)
    (slurm.folder / "bin").mkdir()
    for program in ("bash", "cat", "grep", "mv", "rm", "sleep", "wc"):  # no srun of this machine's
        (slurm.folder / "bin" / program).symlink_to(f"/bin/{program}")
    without_programs = f"mv {slurm.folder}/srun {slurm.folder}/gone; rm {python}; sleep 1; {FAILS}"
    process = slurm.start(without_programs, python=python, programs=f"{slurm.folder}/bin")
    said = process.communicate(timeout=240)[0]
    assert "srun cannot be started: [Errno 2] No such file" in said
    assert "MLflow was not told of the end" in said
    assert slurm.ends() == [(1, "decide", False), (1, "decide", True)]
    assert slurm.calls("scontrol requeue 7") == 1


@pytest.mark.parametrize(
    ("reason", "restarts", "state", "how"),
    [
        ("None", 0, "COMPLETING", "cancelled"),
        ("None", 1, "COMPLETING", "ended"),
        ("TimeLimit", 0, "COMPLETING", "decide"),
        ("None", 0, "RUNNING", "decide"),  # its node shuts down
        ("None", 0, "RUNNING Requeue=0", "barred"),
    ],
)
def test_after_term_it_counts_who_has_sent_it(slurm: Slurm, reason: str, restarts: int, state: str, how: str) -> None:
    (slurm.folder / "reason").write_text(reason)
    slurm.programs["squeue"] = (
        "[ $(grep -c squeue {folder}/calls) -gt 1 ] && cat {folder}/reason"  # first without answer
    )
    process = slurm.start("touch $0.up; sleep 1.5; exit 143")
    _wait_for(slurm.folder / "step_1.up")
    (slurm.folder / "job").write_text(RECORD.replace("Restarts=0", f"Restarts={restarts}").replace("RUNNING", state))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert slurm.ends() == [(143, how, how == "decide")]
    assert len(slurm.steps()) == 1  # no ranks on a node that shuts down


def test_a_job_that_slurm_has_started_elsewhere_is_left_alone(slurm: Slurm) -> None:
    (slurm.folder / "job").write_text(RECORD.replace("Restarts=0", "Restarts=1"))
    code, said = slurm.run(FAILS)
    assert code == 1
    assert "is not this attempt's any more" in said
    assert slurm.ends() == []


def test_a_controller_that_is_away_is_asked_again(slurm: Slurm) -> None:
    away = f"[ $(grep -c 'show job' {slurm.folder}/calls) -gt 3 ] || {{ echo away >&2; exit 1; }}"
    slurm.programs["scontrol"] = f'case "$*" in *"show job"*) {away} ;; esac; {slurm.programs["scontrol"]}'
    slurm.run("exit 75")
    assert slurm.calls("scontrol requeue 7") == 1


def test_a_missing_configuration_ends_the_job_before_any_rank_starts(slurm: Slurm) -> None:
    slurm.run_dir.config.unlink()
    slurm.run_dir.path.rmdir()
    code, said = slurm.run("exit 0")
    assert code == 2
    assert f"{slurm.run_dir.path}: no such file" in said
    assert not (slurm.folder / "steps").exists()


def test_another_node_requeues_a_job_from_which_slurm_has_taken_the_one_of_its_batch_script(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.run("exit 0")  # writes the programs
    (slurm.folder / "calls").unlink()
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    monkeypatch.setattr("dist_transformer.cluster.batch_host.POLL_SECONDS", 0.0)
    (slurm.folder / "job").write_text(RECORD.replace("BatchHost=n1", "BatchHost=n7"))
    watch("7", 0, slurm.run_dir)
    assert slurm.calls("scontrol requeue 7") == 1
    assert slurm.ends()[-1] == (None, "lost", True)
    watch("7", 1, slurm.run_dir)  # another attempt
    assert slurm.calls("scontrol requeue 7") == 1


TAKEN = RECORD.replace("BatchHost=n1", "BatchHost=n7").replace("RUNNING", "COMPLETING")
AGAIN = TAKEN.replace("Restarts=0", "Restarts=1")


@pytest.mark.parametrize(
    ("record", "has_ended", "requeues", "excludes"),
    [
        (AGAIN, False, 0, 1),  # back before Slurm missed it, which has requeued the job
        (AGAIN, True, 0, 0),  # the batch script requeued it, and its node has left the job first
        (TAKEN.replace("Reason=None", "Reason=JobLaunchFailure"), False, 1, 1),  # set down
        (TAKEN, False, 0, 0),  # a person cancels what is left of the job
        (RECORD, False, 0, 0),  # this watch alone is ended
    ],
)
def test_at_term_the_other_node_sees_whether_that_of_the_batch_script_was_taken(
    slurm: Slurm, record: str, has_ended: bool, requeues: int, excludes: int
) -> None:
    """The new list of excluded nodes is refused once, as if the job were still at work."""
    slurm.programs["scontrol"] += "\n" + '[[ "$*" != *Exc* || $(grep -c Exc {folder}/calls) -gt 1 ]]'
    slurm.programs["sinfo"] = "printf '%s|idle|f|g\\n' n1 n2 n3 n4 n7"
    slurm.run("exit 0")  # writes the programs
    (slurm.folder / "calls").unlink()
    if not has_ended:
        note_begin(slurm.run_dir, "7", 0, "n[1-2]", 2)
    module = [sys.executable, "-m", "dist_transformer.cluster.batch_host", "7", "0", str(slurm.run_dir.path)]
    process = subprocess.Popen(module, env={**os.environ, "PATH": f"{slurm.folder}:/usr/bin:/bin"})
    while not ignores(process.pid, signal.SIGUSR2):  # from then on it waits for TERM
        time.sleep(0.05)
    (slurm.folder / "job").write_text(record)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0
    assert slurm.calls("scontrol requeue 7") == requeues
    assert slurm.calls("scontrol update JobId=7 ExcNodeList=n7") == 2 * excludes
    assert [end for end in slurm.ends() if end[1] == "lost"] == [(None, "lost", True)] * excludes


@pytest.mark.parametrize("fault", ["no disk", "sinfo does not answer", "sinfo times out once"])
def test_neither_a_disk_nor_a_slow_controller_keeps_the_job_from_being_requeued(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault != "no disk":
        until = 9 if "once" not in fault else 1
        slurm.programs["sinfo"] = "[ $(grep -c ^sinfo {folder}/calls) -gt UNTIL ] || exit 1".replace(
            "UNTIL", str(until)
        )
    slurm.run("exit 0")  # writes the programs
    (slurm.folder / "calls").unlink()
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    monkeypatch.setattr("dist_transformer.cluster.batch_host.POLL_SECONDS", 0.0)
    (slurm.folder / "job").write_text(RECORD.replace("BatchHost=n1", "BatchHost=n7"))
    before = len(slurm.ends())
    if fault == "no disk":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr("dist_transformer.cluster.batch_host.note_lost_host", Mock(side_effect=full))
    watch("7", 0, slurm.run_dir)
    assert slurm.calls("scontrol requeue 7") == 1
    assert len(slurm.ends()) == before + (fault != "no disk")  # noted once
    assert slurm.calls("sinfo") == {"no disk": 1, "sinfo does not answer": TRIES, "sinfo times out once": 2}[fault]


def test_a_live_node_is_known_by_its_refusal_and_a_dead_one_by_its_silence() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as closed,
        contextlib.closing(SilentPort()) as silent,
    ):
        closed.bind(("127.0.0.1", 0))  # nothing listens
        places = {"accepts": server.getsockname(), "refuses": closed.getsockname(), "silent": silent.address}
        found = silent_nodes.answers({**places, "nameless": ("no-such-host.invalid", 1)})
    assert {name: code == 0 for name, code in found.items()} == {"accepts": True, "refuses": False}


def ignores(pid: int, number: signal.Signals) -> bool:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
