"""The runs of a sweep lie below one run in MLflow, on a real store without a server."""

import shutil
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from mlflow import MlflowClient
from tracking_helpers import TimedTracker, run_id_of, settings_of, tracker_of, train

from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.run.sweep_folder import SweepDir, SweepState
from dist_transformer.tracking.mlflow_client import REPLACES_TAG
from dist_transformer.tracking.parent_run import PARENT_TAG, end_if_all_finished, run_name_of, store_folder
from dist_transformer.tracking.tracker import Tracker, store_uri, target_of

NUM_POINTS = 3


@pytest.fixture
def sweep(tmp_path: Path, empty_database: Path) -> SweepDir:
    """A sweep of three points in a folder of runs that has a store."""
    folder = SweepDir(tmp_path / "runs" / "swept")
    folder.path.mkdir(parents=True)
    shutil.copy(empty_database, folder.path.parent / "mlflow.db")
    folder.file.write_text("grid: {run.seed: [1, 2, 3]}\n")
    points = [{"run.seed": seed} for seed in range(1, NUM_POINTS + 1)]
    write_json(folder.state, SweepState("swept", "uid-of-the-sweep", points).as_json())
    return folder


@pytest.fixture
def client(sweep: SweepDir) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{sweep.path.parent}/mlflow.db")


def _started(sweep: SweepDir, task: int, uri: str | None = None) -> Tracker:
    run_dir = sweep.task(task)
    tracker = Tracker(run_dir, settings_of(uri), run_dir.name, sweep.path, f"uid of {run_dir.name}")
    tracker.start({"run.seed": str(task)}, {}, "")
    return tracker


def _parent_id(sweep: SweepDir) -> str:
    return str(read_json(sweep.common.tracking)["run_id"])


def _runs(client: MlflowClient) -> dict[str, str]:
    """Name and status of every run."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {run.info.run_name: run.info.status for run in client.search_runs(experiments)}


def test_the_runs_of_a_sweep_that_begin_at_once_have_one_parent(sweep: SweepDir, client: MlflowClient) -> None:
    trackers = [_started(sweep, task) for task in range(NUM_POINTS)]
    threads = [threading.Thread(target=tracker.close, args=("SCHEDULED",)) for tracker in trackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _runs(client) == {"swept": "RUNNING", **{f"swept/task_{task}": "SCHEDULED" for task in range(NUM_POINTS)}}
    parents = {client.get_run(run_id_of(sweep.task(task))).data.tags[PARENT_TAG] for task in range(NUM_POINTS)}
    assert parents == {_parent_id(sweep)}


def test_the_parent_is_finished_when_all_points_are_and_runs_again_with_a_new_one(
    sweep: SweepDir, client: MlflowClient
) -> None:
    statuses = []
    for task in range(NUM_POINTS):
        tracker = _started(sweep, task)
        train(MetricsLog(sweep.task(task).metrics), range(1, 6))
        tracker.close("FINISHED")
        statuses.append(_runs(client)["swept"])
    assert statuses == ["RUNNING", "RUNNING", "FINISHED"]
    _started(sweep, 0).close("FAILED")
    assert _runs(client)["swept"] == "RUNNING"


@pytest.mark.parametrize(("num_finished", "ends"), [(NUM_POINTS - 1, 0), (NUM_POINTS, 1), (NUM_POINTS + 1, 1)])
def test_a_point_that_stands_in_mlflow_twice_does_not_keep_the_parent_from_its_end(
    sweep: SweepDir, num_finished: int, ends: int
) -> None:
    class Parent:
        run_id = "parent"
        ended: ClassVar[list[str]] = []

        def statuses_with_tag(self, tag: str, value: str) -> list[str]:
            return ["FINISHED"] * num_finished + ["FAILED"]

        def set_status(self, status: str, time_ms: int) -> None:
            self.ended.append(status)

    parent = Parent()
    end_if_all_finished(parent, sweep, 0)  # type: ignore[arg-type]
    assert parent.ended == ["FINISHED"] * ends


def test_a_parent_whose_id_was_lost_is_found_again(sweep: SweepDir, client: MlflowClient) -> None:
    _started(sweep, 0).close("SCHEDULED")
    first = _parent_id(sweep)
    sweep.common.tracking.unlink()
    _started(sweep, 1).close("SCHEDULED")
    assert _parent_id(sweep) == first
    assert client.get_run(run_id_of(sweep.task(1))).data.tags[PARENT_TAG] == first


def test_a_parent_deleted_by_its_user_is_restored(sweep: SweepDir, client: MlflowClient) -> None:
    _started(sweep, 0).close("SCHEDULED")
    client.delete_run(_parent_id(sweep))
    _started(sweep, 0).close("SCHEDULED")
    assert client.get_run(_parent_id(sweep)).info.lifecycle_stage == "active"


def test_on_another_server_the_sweep_has_another_parent(sweep: SweepDir, tmp_path: Path, empty_database: Path) -> None:
    _started(sweep, 0).close("SCHEDULED")
    first = _parent_id(sweep)
    shutil.copy(empty_database, tmp_path / "other.db")
    uri = f"sqlite:///{tmp_path}/other.db"
    _started(sweep, 0, uri).close("SCHEDULED")
    assert _parent_id(sweep) != first
    other = MlflowClient(tracking_uri=uri)
    assert _runs(other) == {"swept": "RUNNING", "swept/task_0": "SCHEDULED"}
    assert REPLACES_TAG not in other.get_run(_parent_id(sweep)).data.tags  # the first is not lost, only elsewhere


def test_the_sweep_file_is_kept_with_the_parent(sweep: SweepDir, client: MlflowClient, tmp_path: Path) -> None:
    _started(sweep, 0).close("SCHEDULED")
    kept = client.download_artifacts(_parent_id(sweep), "sweep.yaml", str(tmp_path))
    assert Path(kept).read_text() == sweep.file.read_text()


def test_a_server_that_is_away_costs_a_run_of_a_sweep_nothing_and_is_caught_up_later(
    sweep: SweepDir, client: MlflowClient
) -> None:
    tracker = TimedTracker(sweep.task(0), settings_of("http://127.0.0.1:9"), "task_0", sweep.path, "uid of task_0")
    tracker.close_seconds = 1
    tracker.start({}, {}, "")
    train(MetricsLog(sweep.task(0).metrics), range(1, 6))
    tracker.close("FINISHED")
    assert not sweep.common.tracking.exists()
    later = _started(sweep, 0)
    later.close("FINISHED")
    run = client.get_run(run_id_of(sweep.task(0)))
    assert run.data.tags[PARENT_TAG] == _parent_id(sweep)
    assert run.data.metrics["train/loss"] == 10 / 5


def test_a_run_on_its_own_has_no_parent_and_its_own_name(stored_run_dir: RunDir) -> None:
    tracker = tracker_of(stored_run_dir, None)
    tracker.start({}, {}, "")
    tracker.close("FINISHED")
    client = MlflowClient(tracking_uri=f"sqlite:///{stored_run_dir.path.parent}/mlflow.db")
    assert PARENT_TAG not in client.get_run(run_id_of(stored_run_dir)).data.tags
    assert run_name_of(stored_run_dir, "a run") == "a run"


def test_the_runs_of_a_sweep_use_the_store_of_the_folder_that_the_sweep_is_in(sweep: SweepDir) -> None:
    root = sweep.path.parent
    assert store_folder(sweep.path) == root == store_folder(root)
    assert store_uri(sweep.path) == store_uri(root)
    assert target_of(settings_of(None), sweep.task(0), sweep.path).artifact_root == root / "mlartifacts"
