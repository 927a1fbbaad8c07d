"""The verbs that watch and steer, chains and the preflight, on jobs of a real cluster."""

import json
import resource
import signal
import sys
from pathlib import Path

import pytest
from running import with_constants
from slurm_runs import CONFIG, MAX_STEPS, SubmittedRun, program, signal_ranks, submit
from slurm_test_cluster import HERE, PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
REPOSITORY = HERE.parents[1]
SHORT = ("training.max_steps=6", "schedule.warmup_steps=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, in which their corpus is prepared once."""
    return tmp_path_factory.mktemp("commands") / "runs"


def say(cluster: SlurmCluster, *arguments: str) -> str:
    return cluster.run(*program(*arguments))


def is_over(cluster: SlurmCluster, *job_ids: str) -> bool:
    states = cluster.run("squeue", "--noheader", "--states=all", f"--jobs={','.join(job_ids)}", "--format=%T").split()
    return not {"PENDING", "RUNNING", "COMPLETING"} & set(states)


def test_a_run_is_watched_stopped_resumed_and_cancelled(slurm_cluster: SlurmCluster, root: Path) -> None:
    run = submit(slurm_cluster, root, "watched", "training.max_steps=1000000")
    folder = str(run.run_dir.path)
    run.wait_for_step(10)
    for asked in (folder, run.job_id):
        found = json.loads(say(slurm_cluster, "status", asked, "--json", "--root", str(root)))
        assert (found["run"], found["job"]["id"], found["job"]["state"]) == ("watched", run.job_id, "RUNNING")
        assert found["step"] >= 10
        assert found["job"]["nodes"] == "n[1-2]"
        assert 0 <= found["time"] - found["heartbeat_time"] < 30
    assert f"job: {run.job_id} RUNNING" in say(slurm_cluster, "status", folder)
    assert "watched" in say(slurm_cluster, "list", str(root))

    signal_ranks(signal.SIGSTOP, run, [1])  # so that rank 0 waits for it in a collective
    stacks = say(slurm_cluster, "stacks", folder)
    signal_ranks(signal.SIGCONT, run, [1])
    assert "rank 0" in stacks
    assert "loop.py" in stacks
    assert "stopped by a signal" in stacks

    say(slurm_cluster, "stop", folder)
    wait_until(lambda: is_over(slurm_cluster, run.job_id), PATIENCE_SECONDS, run.log)
    assert "stopped by the file" in run.log()
    assert [record["exit_code"] for record in run.attempts("ended")] == [75]
    stopped_at = max(run.steps())
    assert f"not requeued: stopped by the file {run.run_dir.stop_file}" in say(slurm_cluster, "logs", folder)

    first = run.job_id
    say(slurm_cluster, "resume", folder)
    assert run.job_id != first
    run.wait_for_step(stopped_at + 10)
    steps = run.steps()  # read once: the run goes on
    assert steps == list(range(1, steps[-1] + 1))
    say(slurm_cluster, "cancel", run.job_id, "--root", str(root))
    wait_until(lambda: is_over(slurm_cluster, run.job_id), PATIENCE_SECONDS, run.log)
    assert slurm_cluster.state(run.job_id) == "CANCELLED"
    assert not run.attempts("ended")[-1]["requeued"]
    assert json.loads(say(slurm_cluster, "status", folder, "--json"))["state"] == "stopped"


FROM_PYTHON = """
import sys
from dist_transformer import load_config, submit
config = load_config(sys.argv[1], *sys.argv[2:])
print(submit(config, ["prepare", "train"]).job_id)
"""


def test_jobs_after_each_other_that_python_submits_prepare_and_train(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    place = (f"run.root={tmp_path}", "run.name=whole", *SHORT, "slurm.nodes=1", "checkpoints.every_steps=3")
    job_id = slurm_cluster.run(sys.executable, "-c", FROM_PYTHON, str(config), *place).strip()
    run = SubmittedRun(slurm_cluster, RunDir(tmp_path / "whole"))
    assert run.job_id == job_id
    ids = [*read_json(run.run_dir.job)["stages"].values(), run.job_id]

    def logs() -> str:
        return "\n".join(path.read_text() for path in run.run_dir.slurm.glob("*.log"))

    wait_until(lambda: is_over(slurm_cluster, *ids), PATIENCE_SECONDS, logs)
    assert {slurm_cluster.state(job_id) for job_id in ids} == {"COMPLETED"}, logs()
    assert read_json(run.run_dir.state)["state"] == "finished"


def test_the_preflight_finds_the_slow_node_and_the_job_trains_without_it(
    slurm_cluster: SlurmCluster, root: Path
) -> None:
    tolerant = with_constants({"cluster.script.PREFLIGHT_TOLERANCE": 0.3})  # the nodes share one machine
    cluster = SlurmCluster(slurm_cluster.folder, {**slurm_cluster.environment, **tolerant})
    slurm_cluster.node("slow", "n2")
    try:
        run = submit(
            cluster, root, "away", "slurm.nodes=3", "data.lanes=3", *SHORT,
            "slurm.preflight=exclude",
        )  # fmt: skip
        run.wait_for_end()
    finally:
        slurm_cluster.node("heal", "n2")
    assert [record["nodes"] for record in run.attempts("began")] == ["n[1-3]", "n[1,3-4]"], run.log()
    assert list(read_json(run.run_dir.excluded)) == ["n2"]
    assert run.steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "name", ["a b", "$(touch owned)", "-o", "\u00fcber", "it's", "a;touch owned", "..", "a\nb", "%a"]
)
def test_an_odd_name_of_a_run_is_refused_and_nothing_of_it_is_executed(
    slurm_cluster: SlurmCluster, tmp_path: Path, name: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    before = slurm_cluster.run("squeue", "--noheader", "--states=all", "--format=%i")
    with pytest.raises(AssertionError, match="exit code 2"):
        slurm_cluster.run(*program("submit", str(config), f"run.name={name}"), cwd=tmp_path)
    assert slurm_cluster.run("squeue", "--noheader", "--states=all", "--format=%i") == before
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_an_odd_folder_of_runs_is_quoted_everywhere(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    root = tmp_path / 'it\'s $(touch owned) \u00fc; "quoted" -x'
    run = submit(slurm_cluster, root, "inside", *SHORT, "slurm.nodes=1")
    run.wait_for_end()
    assert read_json(run.run_dir.state)["state"] == "finished"
    assert "finished" in say(slurm_cluster, "status", str(run.run_dir.path))
    assert not list(tmp_path.rglob("owned"))
    assert MAX_STEPS > max(run.steps()) == 6


def test_what_is_exported_before_submit_reaches_each_attempt_and_is_written_nowhere(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The batch script, which nobody else may read, runs all the same: sbatch has a copy of it. Limits of the shell stay."""
    seen = tmp_path / "seen"
    again = '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 60; }'
    setup = json.dumps([f'printf "%s\\n" "$PGPASSWORD" "$(ulimit -Sn)" >> {seen}', again, "exit 0"])
    cluster = SlurmCluster(slurm_cluster.folder, {**slurm_cluster.environment, "PGPASSWORD": "of-the-shell"})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        run = submit(cluster, tmp_path / "runs", "secret", f"slurm.setup={setup}", "slurm.nodes=1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: is_over(cluster, run.job_id), PATIENCE_SECONDS, run.log)
    assert seen.read_text().split()[::2] == ["of-the-shell"] * 2
    assert str(soft - 1) not in seen.read_text().split()  # a limit of the shell
    files = [path for path in run.run_dir.path.rglob("*") if path.is_file()]
    assert run.run_dir.submitted_script in files
    assert [path for path in files if b"of-the-shell" in path.read_bytes()] == []
