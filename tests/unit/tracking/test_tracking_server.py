"""Against a real `mlflow server` that comes late, dies and comes back. The tests share it, in the order they stand."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tracking_helpers import (
    Server,
    curves_in_file,
    curves_on_server,
    run_id_of,
    sent_step,
    settings_of,
    tracker_of,
    train,
    wait_until,
)

from dist_transformer.run_dir import RunDir
from dist_transformer.tracking import shipper
from dist_transformer.tracking.metrics_log import MetricsLog
from dist_transformer.tracking.tracker import sync

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    """Not started yet."""
    server = Server(tmp_path_factory.mktemp("server"), empty_database)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for new points and for the server more often than a real run does."""
    monkeypatch.setattr(shipper, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(shipper, "LONGEST_WAIT_SECONDS", 1.0)


def test_a_server_that_starts_after_training_did_gets_everything(server: Server, run_dir: RunDir) -> None:
    tracker = tracker_of(run_dir, server.uri)
    tracker.start({"seed": "1", "empty": ""}, {"host": "n1"}, "model: base\n")
    train(MetricsLog(run_dir.metrics), range(1, 101))
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    tracker.checkpoint_saved(100, run_dir.checkpoints / "step_00000100", {"loss": 0.1})
    tracker.model_written(run_dir.model, {"bleu": 27.5})
    server.start()
    tracker.close("FINISHED")
    run = MlflowClient(tracking_uri=server.uri).get_run(run_id_of(run_dir))
    assert curves_on_server(server.uri, run.info.run_id) == curves_in_file(run_dir)
    assert run.data.params == {"seed": "1", "empty": ""}
    assert (run.data.metrics["checkpoint/loss"], run.data.metrics["model/bleu"]) == (0.1, 27.5)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")


def test_what_close_left_behind_is_sent_by_sync(server: Server, run_dir: RunDir) -> None:
    tracker = tracker_of(run_dir, "http://127.0.0.1:9", close_seconds=1)
    tracker.start({}, {}, "model: base\n")
    train(MetricsLog(run_dir.metrics), range(1, 51))
    tracker.close("FAILED")
    delivery = sync(run_dir, settings_of(server.uri), run_dir.path.parent)
    assert delivery.points == 50 * 2 + 50 // 5
    assert delivery.events == 2
    assert curves_on_server(server.uri, delivery.run_id) == curves_in_file(run_dir)
    assert MlflowClient(tracking_uri=server.uri).get_run(delivery.run_id).info.status == "FAILED"


def test_a_server_killed_in_the_middle_loses_and_repeats_nothing(server: Server, run_dir: RunDir) -> None:
    tracker = tracker_of(run_dir, server.uri)
    log = MetricsLog(run_dir.metrics)
    tracker.start({}, {}, "model: base\n")
    train(log, range(1, 1001))
    wait_until(lambda: sent_step(run_dir) > 0)
    server.kill()
    train(log, range(1001, 1501))
    server.start()
    train(log, range(1501, 2001))
    tracker.close("SCHEDULED")
    run_id = run_id_of(run_dir)
    assert curves_on_server(server.uri, run_id) == curves_in_file(run_dir)
    assert MlflowClient(tracking_uri=server.uri).get_run(run_id).info.status == "SCHEDULED"
