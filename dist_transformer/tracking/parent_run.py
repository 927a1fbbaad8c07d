"""The parent run in MLflow of the runs of a sweep: created by the first of them that reaches the server."""

from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from dist_transformer.config.credentials import without_credentials
from dist_transformer.run.folder import RunDir
from dist_transformer.run.sweep_folder import SweepDir, read_sweep_state, sweep_of
from dist_transformer.tracking.outbox import Target, load_memory

if TYPE_CHECKING:
    from dist_transformer.tracking.mlflow_client import TrackedRun

PARENT_TAG = "mlflow.parentRunId"
"""Tag by which MLflow's pages show one run below another."""

LOCK_SECONDS = 10


def run_name_of(run_dir: RunDir, run_name: str) -> str:
    """The run's name in MLflow, prefixed with the sweep's for a run of a sweep."""
    sweep = sweep_of(run_dir)
    return run_name if sweep is None else f"{sweep.path.name}/{run_name}"


def store_folder(root: Path) -> Path:
    """The folder whose store the runs in `root` use; for a sweep's runs the one that the sweep is in."""
    return root.absolute().parent if SweepDir(root).state.is_file() else root


def join_sweep(run: "TrackedRun", sweep: SweepDir, target: Target) -> "TrackedRun":
    """Makes `run` a child of the sweep's run, which is found or created, and returns the latter.

    Raises:
        ServerTrouble: the server or the lock of the sweep's folder is not available: to be retried.
        UserError: sweep.json is damaged.
    """
    from dist_transformer.tracking import mlflow_client

    state, address = read_sweep_state(sweep), without_credentials(target.uri)
    assert state is not None, f"{sweep.state} was there when the run began"
    # All runs of a sweep may begin at once; the second one finds the parent that the first created.
    with mlflow_client.translated_errors(), FileLock(sweep.tracking_lock, timeout=LOCK_SECONDS):
        memory = load_memory(sweep.common.tracking, state.name)
        memory.run_id = state.uid
        if memory.uri != address:
            memory.forget_server()
        parent = mlflow_client.open_run(target, memory)
        if parent.run_id != memory.mlflow_run_id:
            parent.log_text(sweep.file.read_text(encoding="utf-8"), sweep.file.name)
        memory.uri, memory.mlflow_run_id = address, parent.run_id
        memory.save(sweep.common.tracking)
    parent.set_status("RUNNING", 0)
    run.set_tags({PARENT_TAG: parent.run_id})
    return parent


def end_if_all_finished(parent: "TrackedRun", sweep: SweepDir, time_ms: int) -> None:
    """Sets the sweep's run to FINISHED if all of its points are."""
    state = read_sweep_state(sweep)
    statuses = parent.statuses_with_tag(PARENT_TAG, parent.run_id)
    if state is not None and statuses.count("FINISHED") >= len(state.points):
        parent.set_status("FINISHED", time_ms)
