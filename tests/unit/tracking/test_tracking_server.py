"""Against a real `mlflow server` over SQLite and over PostgreSQL that comes late, dies, freezes and comes back."""

import time
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient
from mlflow_server import Server, wait_until
from tracking_helpers import (
    assert_complete,
    assert_never_held_up,
    run_id_of,
    save_checkpoint,
    sent_step,
    settings_of,
    tracker_of,
    train,
    train_while,
)

from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.tracking.tracker import sync

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("impatience")]

FROZEN_SECONDS = {"sqlite_server": 25, "postgres_server": 12}
"""Longer than two requests, each of which is given up after 10 seconds; and about one."""


@pytest.fixture(scope="module", params=["sqlite_server", "postgres_server"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server: Server = request.getfixturevalue(request.param)
    yield server
    server.stop()


@pytest.fixture
def running(server: Server) -> Server:
    if not server.is_started:
        server.start()
    return server


def test_a_server_that_starts_after_training_did_gets_everything(server: Server, run_dir: RunDir) -> None:
    server.stop()
    tracker = tracker_of(run_dir, server.uri)
    tracker.start({"seed": "1", "empty": ""}, {"host": "n1"}, "model: base\n")
    train(MetricsLog(run_dir.metrics), range(1, 101))
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    save_checkpoint(tracker, run_dir.path, 100)
    tracker.model_written(run_dir.model)
    server.start()
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    run = MlflowClient(tracking_uri=server.uri).get_run(run_id_of(run_dir))
    assert run.data.params == {"seed": "1", "empty": ""}
    assert run.data.metrics["checkpoint/loss"] == 0.1
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a run")


def test_what_close_left_behind_is_sent_by_sync(running: Server, run_dir: RunDir) -> None:
    tracker = tracker_of(run_dir, "http://127.0.0.1:9", close_seconds=1)
    tracker.start({}, {}, "model: base\n")
    train(MetricsLog(run_dir.metrics), range(1, 51))
    tracker.close("FAILED")
    delivery = sync(run_dir, settings_of(running.uri), run_dir.path.parent)
    assert delivery.points == 50 * 2 + 50 // 5
    assert delivery.events == 2
    assert_complete(running.uri, run_dir)
    assert MlflowClient(tracking_uri=running.uri).get_run(delivery.run_id).info.status == "FAILED"


def test_a_server_killed_again_and_again_loses_and_repeats_nothing(running: Server, run_dir: RunDir) -> None:
    tracker = tracker_of(run_dir, running.uri)
    log = MetricsLog(run_dir.metrics)
    tracker.start({}, {}, "model: base\n")
    seconds: list[float] = []

    def train_until_sent(step: int) -> None:
        seconds.extend(train_while(log, tracker, len(seconds) + 1, lambda: sent_step(run_dir) < step))

    train_until_sent(1)
    for _ in range(2):
        running.kill()
        killed_at = len(seconds)
        seconds.extend(train_while(log, tracker, killed_at + 1, lambda: False))
        running.start()
        train_until_sent(killed_at + 1)
    tracker.close("SCHEDULED")
    assert_complete(running.uri, run_dir)
    assert_never_held_up(seconds)
    assert MlflowClient(tracking_uri=running.uri).get_run(run_id_of(run_dir)).info.status == "SCHEDULED"


def test_a_frozen_server_holds_up_no_step_and_gets_all_once_it_thaws(
    running: Server, run_dir: RunDir, request: pytest.FixtureRequest
) -> None:
    tracker = tracker_of(run_dir, running.uri)
    log = MetricsLog(run_dir.metrics)
    tracker.start({}, {}, "model: base\n")
    train(log, range(1, 11))
    wait_until(lambda: sent_step(run_dir) == 10)
    running.freeze()
    thaws_at = time.monotonic() + FROZEN_SECONDS[request.node.callspec.params["server"]]
    seconds = train_while(log, tracker, 11, lambda: time.monotonic() < thaws_at)
    assert sent_step(run_dir) == 10
    running.thaw()
    tracker.close("FINISHED")
    assert_complete(running.uri, run_dir)
    assert_never_held_up(seconds)
