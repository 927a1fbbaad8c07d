"""A corpus prepared by a job array on a real Slurm is the one that a single process prepares."""

import contextlib
import re
import signal
import sys
from pathlib import Path

import pytest
from prepare_helpers import check_shards
from slurm_test_cluster import HERE, PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.config.loading import load_config
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare.preparation import prepare

SCRIPT = HERE.parents[1] / "slurm" / "prepare.sbatch"
CONFIG = """
run: {{seed: 5}}
data:
  mixture: {{corpora: {{one: {{demo: train, tags: ["<2de>"]}}, two: {{demo: train}}}}}}
  validation: {{demo: validation}}
  prepared: {prepared}
tokenizer: {{vocabulary_size: 400}}
"""
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


def processes_that_catch(number: signal.Signals) -> int:
    """How many commands of the array's tasks have begun to listen to a signal."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_command = {b"dist_transformer", b"run.name=array"} <= set(
                (process / "cmdline").read_bytes().split(b"\0")
            )
            (caught,) = re.findall(r"SigCgt:\s*(\w+)", (process / "status").read_text())
            found += is_command and bool(int(caught, 16) >> (number - 1) & 1)
    return found


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_array_prepares_what_one_process_prepares_though_a_task_is_stopped(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    config, prepared = tmp_path / "config.yaml", tmp_path / "on slurm"
    config.write_text(CONFIG.format(prepared=prepared))
    cluster = SlurmCluster(
        slurm_cluster.folder, {**slurm_cluster.environment, "DIST_TRANSFORMER_PYTHON": sys.executable}
    )
    arguments = ("--parsable", "--array=0-1", f"--output={tmp_path}/task-%a.log", str(SCRIPT), str(config))
    job_id = cluster.run("sbatch", *arguments, "run.name=array", cwd=SCRIPT.parents[1]).strip()

    def logs() -> str:
        return "\n".join(path.read_text() for path in sorted(tmp_path.glob("task-*.log")))

    wait_until(
        lambda: (prepared / "work").is_dir() and processes_that_catch(signal.SIGUSR1) == 2,
        PATIENCE_SECONDS,
        lambda: f"two tasks at work\n{logs()}",
    )
    cluster.run("scancel", "--signal=USR1", f"{job_id}_0")
    for task in (f"{job_id}_0", f"{job_id}_1"):
        wait_until(lambda task=task: cluster.state(task) in OVER, PATIENCE_SECONDS, lambda: f"an end\n{logs()}")
        assert cluster.state(task) == "COMPLETED", logs()
    assert "stopped while preparing the corpus (signal SIGUSR1)" in logs()
    assert f"job {job_id}_0 attempt 1: " in logs()
    assert logs().count("| validation |") >= 2

    manifest = Manifest.load(prepared)
    check_shards(prepared, manifest)
    assert not (prepared / "work").exists()
    assert prepare(load_config(config, [f"data.prepared={tmp_path}/here"])) == manifest
