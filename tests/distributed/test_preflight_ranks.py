"""A preflight with real ranks: each plays a node of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import NOT_INHERITED, free_port, without

from dist_transformer.files import read_json
from dist_transformer.preflight.outliers import REACHES_FIRST
from dist_transformer.preflight.report import main, rank_file
from dist_transformer.processes.launching import rank_environment

pytestmark = pytest.mark.slow

TOLERANCE = 0.05
"""The ranks share a few cores with other tests: what is judged here is who comes, and not how fast."""


@pytest.fixture
def start_rank(tmp_path):
    """Starts one of three ranks, which is the node n1, n2 or n3."""
    started: list[subprocess.Popen[str]] = []
    port = free_port()

    def start(rank: int, seconds: int) -> "subprocess.Popen[str]":
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SLURMD_NODENAME": f"n{rank + 1}", "OMP_NUM_THREADS": "1"}
        environment = {**without(NOT_INHERITED), **rank_environment(rank, 3, port), **alone}
        command = [sys.executable, "-m", "dist_transformer", "preflight"]
        options = ["--folder", str(tmp_path), "--run-folder", str(tmp_path), "--seconds", str(seconds)]
        started.append(subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_three_ranks_measure_themselves_and_each_other(tmp_path, start_rank, capsys):
    ranks = [start_rank(rank, seconds=540) for rank in range(3)]
    for process in ranks:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    assert main([str(tmp_path), str(TOLERANCE), "n1", "n2", "n3"]) in (0, 3)
    report = read_json(tmp_path / "report.json")
    assert (report["complete"], report["silent"], list(report["nodes"])) == (True, [], ["n1", "n2", "n3"])
    for name in ("matmul_tflops", "all_reduce_gb_per_second", "all_reduce_latency_seconds", "exchange_gb_per_second"):
        assert all(node[name] > 0.0 for node in report["nodes"].values()), name
        assert report["medians"][name] > 0.0
    assert report["nodes"]["n1"]["clock_offset_seconds"] == 0.0
    for node in ("n2", "n3"):  # one machine has one clock: half of the readings do not wait for a processor for so long
        assert abs(report["nodes"][node]["clock_offset_seconds"]) < 1.0
    assert {path.name for path in tmp_path.iterdir()} >= {"report.json", *(f"rank_{rank}.json" for rank in range(3))}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_when_a_rank_never_comes_the_others_say_so_in_time_and_its_node_is_named(tmp_path, start_rank, capsys):
    seconds = 25
    ranks = [start_rank(0, seconds), start_rank(1, seconds)]
    for process in ranks:
        process.communicate(timeout=10 * seconds)
        assert process.returncode in (1, -signal.SIGALRM)
    assert main([str(tmp_path), str(TOLERANCE), "n1", "n2", "n3"]) == 3
    assert "n3: wrote nothing within the time limit" in capsys.readouterr().out
    report = read_json(tmp_path / "report.json")
    assert (report["silent"], report["exclude"], report["complete"]) == (["n3"], ["n3"], False)
    assert report["nodes"]["n1"]["matmul_tflops"] > 0.0
    assert "joining the others" in read_json(rank_file(tmp_path, 0))["together"]


def test_a_node_from_which_rank_0_is_not_reached_is_named_by_that(tmp_path):
    program = """
import sys, time
from pathlib import Path
from dist_transformer.preflight.benchmarks import _measure_together
record = {"node": "n2", "versions": {}, "measures": {}, "together": "was not done with joining the others"}
sys.exit(_measure_together(record, Path(sys.argv[1]), time.monotonic() + 3))
"""
    environment = {**without(NOT_INHERITED), **rank_environment(1, 2, free_port())}  # where nothing listens
    command = [sys.executable, "-c", program, str(rank_file(tmp_path, 1))]
    assert subprocess.run(command, env=environment, timeout=600, check=False).returncode == 1
    record = read_json(rank_file(tmp_path, 1))
    assert record["versions"] == {REACHES_FIRST: "no"}, record["together"]


def test_a_rank_that_hangs_in_a_call_is_ended_by_the_kernel(tmp_path):
    code = (
        "import sys; from dist_transformer.preflight.benchmarks import limit_own_time; limit_own_time(1);"
        "import torch\nwhile True: torch.ones(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=240, env=dict(os.environ), check=False)
    assert done.returncode == -signal.SIGALRM


@pytest.mark.parametrize("script", ["launch/preflight.sh", "slurm/preflight.sbatch"])
def test_the_scripts_are_valid_bash(script):
    path = Path(__file__).resolve().parents[2] / script
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_batch_script_writes_into_a_folder_of_its_job_beside_what_a_user_has(tmp_path):
    (tmp_path / "exclude").write_text("mine")
    (tmp_path / "launch").mkdir()
    programs = {"launch/preflight.sh": 'echo "$3"', "python3": f"echo {tmp_path}/launch"}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).resolve().parents[2] / "slurm" / "preflight.sbatch"
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for arguments in ([str(tmp_path)], []):
        command = ["bash", str(script), *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == f"{tmp_path}/preflight-7\n"
    assert (tmp_path / "exclude").read_text() == "mine"
