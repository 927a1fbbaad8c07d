"""What the batch script does between Slurm's start of the job and its end, with programs that answer like Slurm's."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_job_helpers import RECORD, SilentPort, Slurm, wait_for

from dist_transformer.cluster import silent_nodes
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.files import read_json

pytestmark = pytest.mark.slow
FAILS = 'echo "1 n2" > $DIST_TRANSFORMER_FIRST_EXIT; exit 137'


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with contextlib.closing(Slurm(tmp_path)) as made:
        yield made


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
    (slurm.run_dir.slurm / "first_exit_7-0.0").unlink()
    slurm.run("exit 2", "exit 0")
    assert slurm.ends() == [(2, "decide", False), (1, "decide", False), (0, "decide", False)]


def test_ranks_that_srun_says_nothing_of_count_by_their_own_exit_code(slurm: Slurm) -> None:
    """It ends with 0 if Slurm takes the node of a rank."""
    slurm.run('echo "75 n1" > $DIST_TRANSFORMER_FIRST_EXIT; exit 0')
    assert slurm.ends() == [(75, "decide", True)]


@pytest.mark.parametrize("said", ['{"state": "running"}', ""])
def test_a_0_of_srun_ends_the_job_only_if_the_ranks_recorded_their_end(slurm: Slurm, said: str) -> None:
    """It also ends with 0 if it waited in vain for ranks that it was to end."""
    state = slurm.run_dir.state
    finished = state.read_text()
    state.write_text(said)
    slurm.run("exit 0", f"echo '{finished}' > {state}; exit 0")
    assert slurm.ends() == [(1, "decide", False), (0, "decide", False)]


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


HIDES_NODES = """case "$*" in
*hostnames*) echo n1; echo n2 ;;
*"show job"*) cat {folder}/job ;;
*config*) echo "SlurmdPort = $(cat {folder}/port)" ;;
*"show node"*) echo "slurm_load_node error: Access/permission denied" >&2; exit 1 ;;
esac"""
"""PrivateData=nodes."""


def test_nodes_that_slurm_hides_are_asked_by_their_names_if_the_own_name_leads_to_a_daemon(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = slurm.folder / "scontrol"
    scontrol.write_text("#!/bin/bash\n" + HIDES_NODES.replace("{folder}", str(slurm.folder)))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    nodes, port = ["localhost", "127.0.0.1", "no-such-host.invalid"], slurm.folder / "port"
    port.write_text(str(slurm.listening.getsockname()[1]))
    for own, found in (("localhost", nodes[:2]), ("no-such-host.invalid", None), (None, None)):
        monkeypatch.delenv("SLURMD_NODENAME", raising=False)
        if own is not None:
            monkeypatch.setenv("SLURMD_NODENAME", own)
        if found is None:  # live nodes would be taken for dead ones
            with pytest.raises(SlurmError, match="denied"):
                silent_nodes.nodes_that_answer(nodes)
        else:
            assert silent_nodes.nodes_that_answer(nodes) == found


def test_a_log_says_that_nodes_are_not_watched_where_slurm_hides_them(slurm: Slurm) -> None:
    (slurm.folder / "port").write_text("6818")
    slurm.programs["scontrol"] = HIDES_NODES
    code, said = slurm.run("exit 0")
    assert code == 0
    words = "nodes are not watched: Slurm alone notices a dead one, after minutes: scontrol refused: slurm_load_node"
    assert said.count(words) == 1


def test_a_node_that_was_taken_from_the_job_is_left_out_by_that_name(slurm: Slurm) -> None:
    """As `scontrol update NumNodes` does, and Slurm itself with a node that it has found dead."""
    (slurm.folder / "job").write_text(RECORD.replace("n[1-2]", "n1"))
    slurm.programs["scontrol"] = 'case "$*" in *"hostnames n1") echo n1; exit ;; esac; ' + slurm.programs["scontrol"]
    code, said = slurm.run(FAILS, "exit 0")
    assert (code, "ranks start again on n1 (n2 was taken from the job): begins" in said) == (0, True)


def test_a_node_on_which_ranks_fail_twice_is_left_out(slurm: Slurm) -> None:
    code, said = slurm.run(FAILS, FAILS, "exit 0")
    assert code == 0
    assert "ranks start again on n1 (ranks failed on n2 twice)" in said
    assert "--nodelist=n1" in slurm.steps()[-1]


def test_no_node_is_left_out_where_the_first_ranks_to_fail_twice_only_waited_for_others(slurm: Slurm) -> None:
    waited = FAILS.replace("1 n2", "1 ")
    code, said = slurm.run(waited, waited)
    assert (code, slurm.ends()) == (1, [(1, "decide", False), (1, "decide", True)])
    assert "first on" not in said
    assert "twice" not in said


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


def test_ranks_that_a_suspension_has_cost_a_collective_start_again_without_a_count_and_blame_no_node(
    slurm: Slurm,
) -> None:
    slurm.waits["requeue.SUSPENDED_SECONDS"] = 1
    # More than once: a stop in the moment of a question to Slurm looks like a slow answer, which is no suspension.
    suspended = f"for i in 1 2 3; do kill -STOP $PPID; sleep 1.2; kill -CONT $PPID; sleep 0.2; done; {FAILS}"
    code, said = slurm.run(suspended, suspended, "exit 0")
    assert (code, len(slurm.steps())) == (0, 3)
    assert (
        said.count("ranks start again on n1, n2: begins again, as there is no checkpoint yet; the job was suspended")
        == 2
    )
    assert read_json(slurm.run_dir.restarts)["without_progress"] == 0


def test_a_spare_node_takes_the_place_of_one_that_gives_no_answer(slurm: Slurm) -> None:
    size = "--nodelist={} --nodes=1 --ntasks=2 --ntasks-per-node=2"
    slurm.answers("n2")
    slurm.run(FAILS, "exit 0", spare=1)
    sizes = [size.format("n1"), f"{size.format('n2')} --overlap"]
    assert slurm.steps() == [f"{ALL} {each} --mpi=none" for each in sizes]


def test_what_is_told_to_save_is_told_by_srun_and_requeued(slurm: Slurm) -> None:
    process = slurm.start("trap 'echo saved; exit 75' USR1; touch $0.up; while :; do sleep 0.1; done")
    wait_for((slurm.folder / "step_1.up").exists)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=240)[0]
    assert "told to save" in said
    assert "saved" in said
    assert slurm.ends() == [(75, "decide", True)]
    assert slurm.calls("scontrol requeue 7") == 1


SAVES = "trap 'touch {folder}/saved; exit 75' USR2; touch {folder}/up; "
"""A person's USR1 to the ranks alone may have come just before: another one would end them."""


@pytest.mark.parametrize("is_away", [False, True])
def test_near_the_end_of_the_job_ranks_are_told_to_save_also_where_the_controller_is_away(
    slurm: Slurm, is_away: bool
) -> None:
    (slurm.folder / "job").write_text(f"{RECORD} EndTime=1000000000")
    answer = f"until [ -e {slurm.folder}/up ]; do sleep 0.1; done; "
    answer += f"[ -e {slurm.folder}/saved ] && " * is_away + f"cat {slurm.folder}/job"
    slurm.programs["scontrol"] = slurm.programs["scontrol"].replace(f"cat {slurm.folder}/job", answer)
    slurm.variables["SLURM_JOB_END_TIME"] = "1000000000"
    said = slurm.run(f"{SAVES.format(folder=slurm.folder)}while :; do sleep 0.1; done")[1]
    assert (said.count("told to save"), slurm.calls("scontrol requeue 7")) == (1, 1)
    assert slurm.ends() == [(75, "decide", True)]


@pytest.mark.parametrize("seconds_left", [-1000, 500])
def test_ranks_whose_job_was_given_more_time_train_on(slurm: Slurm, seconds_left: int) -> None:
    (slurm.folder / "job").write_text(f"{RECORD} EndTime=4000000000")
    slurm.variables |= {
        "SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left),
        "DIST_TRANSFORMER_SIGNAL_SECONDS": "600",
    }
    until_asked = f"until grep -q 'show job 7' {slurm.folder}/calls; do sleep 0.1; done; sleep 0.5; exit 0"
    code, said = slurm.run(SAVES.format(folder=slurm.folder) + until_asked)
    assert (code, said.count("told to save"), slurm.calls("show job 7")) == (0, 0, 2)  # and once at the end


def test_ranks_are_told_to_save_once(slurm: Slurm) -> None:
    """The same signal again would end them before the save is complete."""
    told, end = slurm.folder / "told", slurm.folder / "end"
    process = slurm.start(f"trap 'echo >> {told}' USR1; touch $0.up; until [ -e {end} ]; do sleep 0.1; done; exit 75")
    wait_for((slurm.folder / "step_1.up").exists)
    assert process.stdout is not None
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        while "told to save" not in process.stdout.readline():
            assert process.poll() is None
        wait_for(told.exists)
    end.touch()
    process.communicate(timeout=240)
    assert told.read_text() == "\n"


def test_a_log_that_takes_no_more_writes_costs_neither_the_save_nor_the_requeue(slurm: Slurm) -> None:
    with Path("/dev/full").open("w") as full:
        process = slurm.start("trap 'exit 75' USR1; touch $0.up; while :; do sleep 0.1; done", log=full.fileno())
    wait_for((slurm.folder / "step_1.up").exists)
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
        ("None", 0, "COMPLETING PreemptTime=None", "cancelled"),
        ("None", 0, "COMPLETING EndTime=1795791778 PreemptTime=1795791777", "decide"),  # PreemptMode=CANCEL
        ("None", 0, "COMPLETING EndTime=1795798977 PreemptTime=1795791777", "cancelled"),  # SUSPEND, hours before
        ("None", 0, "RUNNING", "decide"),  # its node shuts down
        ("None", 0, "RUNNING Requeue=0", "barred"),
    ],
)
def test_after_term_it_counts_who_has_sent_it(slurm: Slurm, reason: str, restarts: int, state: str, how: str) -> None:
    (slurm.folder / "reason").write_text(reason)
    slurm.programs["squeue"] = (
        "[ $(grep -c squeue {folder}/calls) -gt 1 ] && cat {folder}/reason"  # first without answer
    )
    told = slurm.folder / "told"
    process = slurm.start(f"touch $0.up; until [ -e {told} ]; do sleep 0.1; done; sleep 1; exit 143")
    wait_for((slurm.folder / "step_1.up").exists)
    (slurm.folder / "job").write_text(RECORD.replace("Restarts=0", f"Restarts={restarts}").replace("RUNNING", state))
    process.send_signal(signal.SIGTERM)
    told.touch()  # the ranks end after it, however late it was sent
    process.communicate(timeout=240)
    assert slurm.ends() == [(143, how, how == "decide")]
    assert len(slurm.steps()) == 1  # no ranks on a node that shuts down


def _at_its_limit(slurm: Slurm, more: str = "") -> subprocess.Popen[str]:
    """A job whose ranks run on after TERM, in the time that Slurm leaves them, once the decision is recorded."""
    (slurm.folder / "reason").write_text("TimeLimit")
    requeues = f'[ "$1" != requeue ] || sed -i s/Restarts=0/Restarts=1/ {slurm.folder}/job; '
    slurm.programs["scontrol"] = requeues + slurm.programs["scontrol"]
    process = slurm.start(f"touch $0.up; until [ -e {slurm.folder}/told ]; do sleep 0.1; done; exit 75")
    wait_for((slurm.folder / "step_1.up").exists)
    record = RECORD.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")
    (slurm.folder / "job").write_text(f"{record} {more}")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: bool(slurm.ends()))
    return process


def test_a_job_whose_ranks_run_on_at_its_time_limit_is_requeued_before_slurm_ends_its_script(slurm: Slurm) -> None:
    process = _at_its_limit(slurm)
    wait_for(lambda: slurm.calls("scontrol requeue 7") == 1)
    assert (process.poll(), slurm.ends()) == (None, [(143, "decide", True)])
    (slurm.folder / "told").touch()  # the ranks save after all
    process.communicate(timeout=240)
    assert slurm.ends() == [(143, "decide", True), (75, "ended", False)]
    assert (slurm.calls("scontrol requeue 7"), len(slurm.steps())) == (1, 1)


@pytest.mark.parametrize(
    ("is_stopped", "more", "how", "why"),
    [(True, "", "decide", "stopped by the file"), (False, "Requeue=0", "barred", "requeues are disabled")],
)
def test_at_its_time_limit_a_job_that_is_not_to_be_requeued_leaves_its_ranks_the_time_to_save(
    slurm: Slurm, is_stopped: bool, more: str, how: str, why: str
) -> None:
    if is_stopped:
        slurm.run_dir.stop_file.touch()
    process = _at_its_limit(slurm, more)
    (slurm.folder / "told").touch()
    assert process.communicate(timeout=240)[0].count(f"not requeued: {why}") == 2
    assert (process.returncode, slurm.ends()) == (75, [(143, how, False), (75, how, False)])
    assert slurm.calls("scontrol requeue") == 0


@pytest.mark.parametrize(("ends", "has_term"), [("exit 75", False), ("exit 143", True), (FAILS, False)])
def test_a_job_that_is_being_suspended_is_not_cancelled_and_goes_on_once_it_is_resumed(
    slurm: Slurm, ends: str, has_term: bool
) -> None:
    suspended, runs = RECORD.replace("RUNNING", "SUSPENDED"), slurm.folder / "job"
    counts = f"[ $(grep -c 'show job' {slurm.folder}/calls) -gt 4 ] && echo '{RECORD}' > {runs}"
    slurm.programs["scontrol"] = f'case "$*" in *"show job"*) {counts} ;; esac; {slurm.programs["scontrol"]}'
    runs.write_text(suspended)
    process = slurm.start(f"touch $0.up; sleep 1.5; {ends}", "exit 0")
    wait_for((slurm.folder / "step_1.up").exists)
    if has_term:
        process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=240)[0]
    assert slurm.calls("show job") > 4
    assert "was cancelled" not in said
    if ends == FAILS:
        assert slurm.ends() == [(1, "decide", False), (0, "decide", False)]
    else:
        assert slurm.ends() == [(143 if has_term else 75, "decide", True)]
        assert slurm.calls("scontrol requeue 7") == 1


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
    shutil.rmtree(slurm.run_dir.path)
    code, said = slurm.run("exit 0")
    assert code == 2
    assert f"{slurm.run_dir.path}: no such file" in said
    assert not (slurm.folder / "steps").exists()


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
