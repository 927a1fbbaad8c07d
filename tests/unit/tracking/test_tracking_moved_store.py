"""A store that lies elsewhere now, or is made by several runs at once, on real sqlite."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache
from tracking_helpers import (
    TimedTracker,
    curves_in_file,
    curves_on_server,
    run_id_of,
    settings_of,
    started,
    store_of,
    train,
)

from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event
from dist_transformer.tracking.final_status import settle
from dist_transformer.tracking.tracker import store_uri, sync


@pytest.mark.slow
def test_a_store_that_was_moved_with_its_runs_is_found_and_none_is_made_at_the_old_place(
    stored_run_dir: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = started(stored_run_dir)
    log = MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 6))
    tracker.close("SCHEDULED")
    runs, first = stored_run_dir.path.parent, run_id_of(stored_run_dir)
    moved = RunDir(Path(shutil.move(runs, tmp_path / "elsewhere")) / stored_run_dir.name)
    add_event(moved.tracking_events, "status", {"status": "FAILED"})
    assert settle(moved, "KILLED", settings_of(None), runs, 240) is None
    train(log := MetricsLog(moved.metrics), range(6, 11))
    log.close()
    sent = sync(moved, settings_of(None), runs)
    assert (sent.run_id, sent.points) == (first, 11)
    assert not runs.exists()
    assert curves_on_server(store_of(moved), first) == curves_in_file(moved)
    assert "whole history" not in caplog.text


@pytest.mark.slow
def test_the_files_of_a_run_whose_store_was_moved_go_there_too(stored_run_dir: RunDir, tmp_path: Path) -> None:
    started(stored_run_dir).close("SCHEDULED")
    runs = stored_run_dir.path.parent
    moved = RunDir(Path(shutil.move(runs, tmp_path / "elsewhere")) / stored_run_dir.name)
    _artifact_repos_cache.clear()  # another process, that is
    tracker = TimedTracker(moved, settings_of(None), "a run", runs, "an id that is not asked for")
    moved.report.write_text("<html/>")
    tracker.start({}, {}, "model: base\n")
    tracker.report_written()
    tracker.close("FINISHED")
    assert not runs.exists()
    client = MlflowClient(tracking_uri=store_of(moved))
    names = {file.path for file in client.list_artifacts(run_id_of(moved))}
    assert names == {"config.yaml", "report.html"}


def test_a_run_that_was_moved_away_from_its_store_stays_with_it(stored_run_dir: RunDir, tmp_path: Path) -> None:
    started(stored_run_dir).close("FINISHED")
    runs, first = stored_run_dir.path.parent, run_id_of(stored_run_dir)
    (tmp_path / "archive").mkdir()
    moved = RunDir(Path(shutil.move(stored_run_dir.path, tmp_path / "archive")))
    assert sync(moved, settings_of(None), runs).run_id == first
    assert not (tmp_path / "archive" / "mlflow.db").exists()


def test_the_browser_is_shown_the_store_of_the_folder_of_runs(stored_run_dir: RunDir) -> None:
    assert store_uri(stored_run_dir.path.parent) == store_of(stored_run_dir)


@pytest.mark.slow
def test_a_store_whose_making_was_interrupted_is_not_there(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(client: MlflowClient, max_results: int) -> None:
        raise OSError("the node lost its power")

    monkeypatch.setattr(MlflowClient, "search_experiments", interrupted)
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    with pytest.raises(UserError, match="lost its power"):
        sync(run_dir, settings_of(None), run_dir.path.parent)
    assert not (run_dir.path.parent / "mlflow.db").exists()


FOUR_POINTS = """
import sys
from pathlib import Path
from dist_transformer.config.schema import TrackingConfig
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.tracking.tracker import sync

run_dir = RunDir(Path(sys.argv[1]))
log = MetricsLog(run_dir.metrics)
for step in range(1, 5):
    log.append("train", step, {"loss": 1 / step})
print(sync(run_dir, TrackingConfig(), run_dir.path.parent).points)
"""


@pytest.mark.slow
def test_runs_that_create_the_same_store_at_the_same_moment_all_arrive(run_dir: RunDir) -> None:
    folders = [run_dir.path.parent / f"run_{number}" for number in range(2)]
    commands = [[sys.executable, "-c", FOUR_POINTS, str(folder)] for folder in folders]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [process.communicate()[0] for process in processes] == ["4\n"] * 2
    for folder in folders:
        assert curves_on_server(store_of(run_dir), run_id_of(RunDir(folder))) == curves_in_file(RunDir(folder))
