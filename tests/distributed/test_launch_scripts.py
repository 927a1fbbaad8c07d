"""Every way of starting ranks trains the same run: the scripts of launch/, with their real launchers, on this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from running import NOT_INHERITED, free_port, records, wait_for_step

from dist_transformer.cluster.requeue import first_failure
from dist_transformer.errors import EXIT_FAILED, EXIT_HANG

pytestmark = pytest.mark.slow

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def start(folder: Path, script: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [LAUNCH / script, *arguments],
        cwd=folder,
        env={
            **inherited,
            "PATH": path,
            "DIST_TRANSFORMER_PYTHON": sys.executable,
            "MASTER_PORT": str(free_port()),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def ssh_to_this_machine(small_corpus: Path) -> None:
    """DeepSpeed's launcher asks by ssh whether the machine is there; test machines have no ssh server."""
    ssh = small_corpus / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    ssh.write_text("#!/bin/sh\nexec hostname\n", encoding="utf-8")
    ssh.chmod(0o755)


@pytest.fixture(scope="module")
def alone(train_small) -> Path:
    return train_small("launch-alone")


@pytest.mark.parametrize(
    ("script", "before", "environment"),
    [
        ("local.sh", ["2"], {}),
        ("torchrun.sh", [], {"RANKS_PER_NODE": "2"}),
        ("hostfile.sh", ["hosts"], {}),
    ],
)
def test_a_launcher_starts_two_ranks_that_train_the_same_run(small_corpus, alone, script, before, environment):
    (small_corpus / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    name = script.removesuffix(".sh")
    process = start(small_corpus, script, *before, "small.yaml", f"run.name={name}", **environment)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    run = small_corpus / "runs" / name
    assert [r["batch_digest"] for r in records(run)] == [r["batch_digest"] for r in records(alone)]
    assert "2 ranks" in (run / "train.log").read_text(encoding="utf-8")


def test_a_signal_to_torchrun_saves(small_corpus, alone):
    arguments = ("small.yaml", "run.name=torchrun-stopped", "training.max_steps=100000")
    process = start(small_corpus, "torchrun.sh", *arguments, RANKS_PER_NODE="2")
    run = small_corpus / "runs" / "torchrun-stopped"
    wait_for_step(run, 2)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=600)
    step = records(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{step:08d}" / "manifest.json").is_file(), out


def test_the_node_of_a_rank_that_waited_for_a_frozen_one_is_not_named_to_the_batch_script(small_corpus, tmp_path):
    common = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "DIST_TRANSFORMER_FIRST_EXIT": str(tmp_path / "first")}  # fmt: skip
    arguments = ("train", "small.yaml", "run.name=frozen", "training.max_steps=100000", "training.hang_seconds=6")
    tasks = [
        start(small_corpus, "slurm_task.sh", *arguments, **common, SLURM_PROCID=str(n), SLURMD_NODENAME=f"n{n}")
        for n in range(2)
    ]
    wait_for_step(small_corpus / "runs" / "frozen", 4)
    [frozen] = psutil.Process(tasks[1].pid).children()
    frozen.suspend()
    try:
        out, _ = tasks[0].communicate(timeout=240)
    finally:
        frozen.kill()
        tasks[1].communicate(timeout=240)
    code, node = first_failure(tmp_path / "first")
    assert (tasks[0].returncode, node) == (code, ""), out
    assert code in (EXIT_FAILED, EXIT_HANG)


def test_a_missing_hostfile_is_refused(small_corpus):
    process = start(small_corpus, "hostfile.sh", "no-such-file", "small.yaml")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "no-such-file: no such file; expected lines like: name slots=8" in out
