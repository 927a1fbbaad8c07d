"""A run submitted to a real Slurm: stopped by a signal, requeued, gone on with, finished."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_test_cluster import SlurmCluster, wait_until

from dist_transformer.run_dir import RunDir, read_json

MAX_STEPS = 120
CONFIG = f"""
data:
  train: {{demo: train}}
  filters: {{max_tokens: 96}}
  lanes: 2
  max_tokens: 1024
  window_rows: 500
  audit: true
tokenizer: {{vocabulary_size: 500}}
model: {{preset: tiny, num_encoder_layers: 1, num_decoder_layers: 1, dropout: 0.1}}
optimizer: {{learning_rate: 0.001}}
schedule: {{warmup_steps: 20}}
training: {{max_steps: {MAX_STEPS}, precision: fp32, log_every_steps: 1, threads_per_rank: 1}}
checkpoints: {{every_steps: 40, keep_last: 3, average_last: 2}}
tracking: {{enabled: false}}
slurm: {{nodes: 2, ranks_per_node: 1, time_limit: "30:00", signal_seconds: 60}}
"""


def _program(verb: str, config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "dist_transformer", verb, str(config), f"run.root={config.parent}", *overrides]


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may be under work while the job runs.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _audited(run_dir: RunDir) -> list[dict[str, Any]]:
    """The rows of each step's global batch, lane by lane."""
    return [{key: value for key, value in record.items() if key != "time"} for record in _records(run_dir.audit)]


def _train_steps(run_dir: RunDir) -> list[int]:
    return [record["step"] for record in _records(run_dir.metrics) if record["event"] == "train"]


def _job_log(run_dir: RunDir) -> str:
    return "\n".join(path.read_text() for path in sorted(run_dir.slurm.glob("job-*.log")))


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_on_two_nodes_is_stopped_by_a_signal_requeued_and_finishes_on_the_same_batches(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    run_dir = RunDir(tmp_path / "on_slurm")
    slurm_cluster.run(*_program("submit", config, "run.name=on_slurm"))
    job_id = read_json(run_dir.job)["job_id"]

    wait_until(lambda: len(_train_steps(run_dir)) >= 10, 120, lambda: f"10 steps\n{_job_log(run_dir)}")
    slurm_cluster.run("scancel", "--signal=USR1", job_id)
    wait_until(lambda: "requeued:" in _job_log(run_dir), 60, lambda: f"a requeue\n{_job_log(run_dir)}")
    stopped_at = max(_train_steps(run_dir))
    assert 10 <= stopped_at < MAX_STEPS
    assert (run_dir.checkpoints / f"step_{stopped_at:08d}").is_dir()

    over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
    wait_until(lambda: slurm_cluster.state(job_id) in over, 180, lambda: f"an end\n{_job_log(run_dir)}")
    assert slurm_cluster.state(job_id) == "COMPLETED", _job_log(run_dir)
    assert f"job {job_id} attempt 1: 2 ranks on n[1-2]" in _job_log(run_dir)
    assert _train_steps(run_dir) == list(range(1, MAX_STEPS + 1))
    assert read_json(run_dir.state)["state"] == "finished"
    assert read_json(run_dir.state)["starts"] == 2

    undisturbed = RunDir(tmp_path / "undisturbed")
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(_program("train", config, "run.name=undisturbed", "--ranks", "1"), env=alone, check=True)
    assert len(_audited(run_dir)) == MAX_STEPS
    assert _audited(run_dir) == _audited(undisturbed)
