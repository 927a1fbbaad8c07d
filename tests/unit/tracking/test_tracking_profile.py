"""The table of a profile on its way to MLflow."""

from types import SimpleNamespace
from typing import Any

from dist_transformer.config.schema import TrackingConfig
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records
from dist_transformer.tracking.messages import goes_by, send_event
from dist_transformer.tracking.tracker import Tracker


def test_the_table_of_a_profile_is_a_file_of_the_run_wherever_its_folder_is_by_then(tmp_path):
    run_dir, sent = RunDir(tmp_path / "run"), list[object]()
    run_dir.path.mkdir()
    Tracker(run_dir, TrackingConfig(), "run", tmp_path, "uid").profile_written(run_dir.profile / "profile_rank0.md")
    run_dir.path.rename(tmp_path / "moved")
    moved = RunDir(tmp_path / "moved")
    (event,) = read_records(moved.tracking_events)
    run: Any = SimpleNamespace(log_file=sent.append)
    for lane in ("words", "files", "figures", "model"):
        assert goes_by(event, lane) == (lane == "files")
        send_event(run, event, lane, moved)
    assert sent == [moved.profile / "profile_rank0.md"]
