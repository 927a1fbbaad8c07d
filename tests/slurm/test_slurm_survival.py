"""What happens to a job on a real cluster, and that the run ends as the undisturbed one: same batches, same weights."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_runs import MAX_STEPS, SubmittedRun, signal_ranks, submit, submit_by_hand
from slurm_test_cluster import HERE, PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survival")


@pytest.fixture(scope="module")
def undisturbed(slurm_cluster: SlurmCluster, root: Path) -> SubmittedRun:
    run = submit(slurm_cluster, root, "undisturbed")
    run.wait_for_end()
    return run


@pytest.fixture
def cluster(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """All nodes up and idle, before and after."""
    yield slurm_cluster
    for number in range(1, 5):
        slurm_cluster.node("start", f"n{number}")
        slurm_cluster.node("heal", f"n{number}")
    slurm_cluster.run("scancel", "--user=root")
    slurm_cluster.wait_for_idle_nodes(4)


def test_two_nodes_train_to_the_end(undisturbed: SubmittedRun) -> None:
    assert undisturbed.steps() == list(range(1, MAX_STEPS + 1))
    assert [record["nodes"] for record in undisturbed.attempts("began")] == ["n[1-2]"]
    assert [record["exit_code"] for record in undisturbed.attempts("ended")] == [0]
    assert not undisturbed.run_dir.owner.exists()


def test_a_job_that_is_told_to_save_is_requeued_and_goes_on(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "told")
    run.wait_for_step(10)
    cluster.run("scancel", "--signal=USR1", run.job_id)
    run.wait_for_words("requeued:")
    run.wait_for_end()
    stopped, again = run.history("end")[0], run.history("start")[1]
    assert stopped["state"] == "stopped"
    assert 10 <= stopped["step"] == again["step"] < MAX_STEPS
    assert run.history("saved")[0]["step"] <= stopped["step"]
    assert [record["exit_code"] for record in run.attempts("ended")] == [75, 0]
    run.must_equal(undisturbed)


def test_a_job_near_its_time_limit_saves_and_goes_on(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "limit", "slurm.signal_seconds=600")  # minutes to save in, however busy the machine is
    run.wait_for_step(10)
    # The ranks stand still until Slurm's signal, which it looks for every half minute, has come.
    signal_ranks(signal.SIGSTOP, run)
    minutes = cluster.run("squeue", "--noheader", f"--jobs={run.job_id}", "--format=%M").split(":")[-2]
    cluster.run("scontrol", "update", f"JobId={run.job_id}", f"TimeLimit={int(minutes) + 10}")
    run.wait_for_words("told to save")
    signal_ranks(signal.SIGCONT, run)
    run.wait_for_words("requeued:")
    cluster.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=30")
    run.wait_for_end()
    assert [record["exit_code"] for record in run.attempts("ended")] == [75, 0]
    run.must_equal(undisturbed)


HANGS = """import os, runpy, time

def build(*sizes):
    network = runpy.run_path("{example}")["build"](*sizes)
    network.register_forward_pre_hook(wait)
    return network

def wait(*_):
    while os.path.exists("{hold}"):
        time.sleep(0.1)
"""
"""A network that stands still while there is a file: no signal of Slurm reaches the end of the step."""


def test_a_job_whose_ranks_hang_at_its_time_limit_goes_on_in_the_queue(cluster: SlurmCluster, root: Path) -> None:
    hold, plugin = root / "hold", root / "hangs.py"
    plugin.write_text(HANGS.format(example=HERE.parents[1] / "examples" / "decoder_only.py", hold=hold))
    run = submit(cluster, root, "hangs", f"model.plugin={plugin}:build", "checkpoints.every_steps=10")
    run.wait_for_step(12)
    hold.touch()
    minutes = cluster.run("squeue", "--noheader", f"--jobs={run.job_id}", "--format=%M").split(":")[-2]
    cluster.run("scontrol", "update", f"JobId={run.job_id}", f"TimeLimit={int(minutes) + 1}")
    run.wait_for_words("ranks run on at the time limit")
    run.wait_for_words("requeued: resumes from step_")
    cluster.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=30")
    run.wait_for_attempt(1)  # Slurm has killed them
    hold.unlink()
    run.wait_for_end()
    first, last = run.attempts("ended")[0], run.attempts("ended")[-1]
    assert (first["exit_code"], first["requeued"], last["exit_code"]) == (143, True, 0)
    assert run.history("start")[1]["step"] >= 10
    assert run.steps() == list(range(1, MAX_STEPS + 1))


def test_a_pre_empted_job_saves_and_goes_on_when_the_other_has_ended(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "preempted", "slurm.sbatch.partition=scavenge")
    run.wait_for_step(10)
    cluster.run("sbatch", "--partition=main", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    run.wait_for_attempt(1)
    assert run.attempts("ended")[0]["exit_code"] == 75
    run.wait_for_end()
    run.must_equal(undisturbed)


def test_a_job_that_a_person_requeues_saves_and_goes_on(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "by_a_person")
    run.wait_for_step(10)
    cluster.run("scontrol", "requeue", run.job_id)
    run.wait_for_attempt(1)
    first = run.attempts("ended")[0]
    assert (first["exit_code"], first["requeued"]) == (75, False)  # Slurm does it, not the script
    run.wait_for_end()
    run.must_equal(undisturbed)


def test_a_job_whose_node_dies_keeps_the_other_and_a_spare_one_and_goes_on_at_once(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "dead_n2", "slurm.spare_nodes=1")
    run.wait_for_step(40)  # there is a checkpoint
    cluster.node("kill", "n2")
    run.wait_for_attempt(1)
    assert (run.attempts("began")[1]["attempt"], run.attempts("began")[1]["nodes"]) == (0, "n1,n3"), run.log()
    wait_until(lambda: read_json(run.run_dir.state)["starts"] == 2, PATIENCE_SECONDS, run.log)
    cluster.node("kill", "n3")  # only one is left, half of the wanted ones
    run.wait_for_end()
    assert [record["nodes"] for record in run.attempts("began")[1:]] == ["n1,n3", "n1"]
    assert read_json(run.run_dir.state)["starts"] == 3
    run.must_equal(undisturbed)


def test_a_job_whose_batch_script_dies_with_its_node_goes_on_with_another(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    """n1 has rank 0, too. It comes back with the job's old folder: Slurm would hold a job that gets it again."""
    run = submit(cluster, root, "dead_n1")
    run.wait_for_step(40)
    began = len(run.attempts("began"))  # more than one where ranks had to start again before
    starts = read_json(run.run_dir.state)["starts"]
    cluster.node("kill", "n1")
    run.wait_for_attempt(began)
    assert run.attempts("ended")[-1]["how"] == "lost", run.log()
    assert cluster.run("scontrol", "show", "hostnames", run.attempts("began")[-1]["nodes"]).split() == ["n2", "n3"]
    cluster.node("start", "n1")
    wait_until(lambda: read_json(run.run_dir.state)["starts"] > starts, PATIENCE_SECONDS, run.log)
    cluster.run("scancel", "--signal=USR1", run.job_id)
    run.wait_for_attempt(began + 1)
    assert cluster.run("scontrol", "show", "hostnames", run.attempts("began")[-1]["nodes"]).split() == ["n2", "n3"]
    run.wait_for_end()
    run.must_equal(undisturbed)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_job_whose_node_is_cut_off_goes_on_with_another_and_the_node_that_comes_back_does_no_harm(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun, node: str
) -> None:
    """The ranks there live on, in the middle of a collective; on n1 it is rank 0, which holds the run folder's lock."""
    run = submit(cluster, root, f"cut_{node}", "training.hang_seconds=15")
    run.wait_for_step(40)
    cluster.node("cut", node)
    run.wait_for_attempt(1)
    cluster.node("heal", node)
    run.wait_for_end()
    run.must_equal(undisturbed)


def test_a_controller_that_is_away_when_the_job_wants_to_be_requeued_is_waited_for(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "controller")
    run.wait_for_step(10)
    log = next(run.run_dir.slurm.glob("job-*.log"))
    cluster.node("kill", "controller")
    signal_ranks(signal.SIGUSR1, run)
    wait_until(lambda: "Unable to contact slurm controller" in log.read_text(), PATIENCE_SECONDS, log.read_text)
    cluster.node("start", "controller")
    run.wait_for_end()
    assert [record["exit_code"] for record in run.attempts("ended")] == [75, 0]
    run.must_equal(undisturbed)


def test_a_run_that_is_started_twice_by_accident_is_trained_once(
    cluster: SlurmCluster, root: Path, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, root, "twice")
    run.wait_for_step(10)
    signal_ranks(signal.SIGSTOP, run, [1])  # it must not have ended before the other is refused; rank 0 lives
    second = submit_by_hand(cluster, run)
    wait_until(lambda: cluster.state(second) == "FAILED", PATIENCE_SECONDS, run.log)
    signal_ranks(signal.SIGCONT, run, [1])
    assert f"job {run.job_id} (attempt 0) with pid" in run.log()
    assert "works on this run folder" in run.log()
    run.wait_for_end()
    assert len(run.attempts("began")) == 2
    run.must_equal(undisturbed)


def test_a_disk_that_goes_away_for_a_while_holds_the_run_up_and_does_no_harm(
    cluster: SlurmCluster, undisturbed: SubmittedRun
) -> None:
    run = submit(cluster, cluster.folder / "disk" / "runs", "disk")
    run.wait_for_step(10)
    cluster.node("freeze", "disk")
    try:
        stood_at = max(run.steps())
        cluster.run("sleep", "8")
        assert max(run.steps()) <= stood_at + 1
    finally:
        cluster.node("thaw", "disk")
    run.wait_for_end()
    assert len(run.attempts("began")) == 1
    run.must_equal(undisturbed)
