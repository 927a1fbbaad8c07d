"""The end of a start: what is quick does not wait for what is slow, and a shipper that is given up gets out of the way.

On a real sqlite store; the order of deliveries on a run that only notes them.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow_server import wait_until
from tracking_helpers import (
    curves_in_file,
    curves_on_server,
    run_id_of,
    save_checkpoint,
    sent_step,
    store_of,
    tracker_of,
    train,
)

from dist_transformer.files import write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event
from dist_transformer.tracking import mlflow_client, mlflow_models, shipper
from dist_transformer.tracking.final_status import has_arrived
from dist_transformer.tracking.mlflow_client import TrackedRun
from dist_transformer.tracking.outbox import CHANNELS, DeliveryState, Point, ServerTrouble, Target, load_delivery_state
from dist_transformer.tracking.shipper import Shipper
from dist_transformer.tracking.tracker import Tracker

HELD_SECONDS = 3.0


@pytest.fixture
def client(stored_run_dir: RunDir) -> MlflowClient:
    return MlflowClient(tracking_uri=store_of(stored_run_dir))


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end of the test in any case: no thread is left waiting for it."""
    event = threading.Event()
    yield event
    event.set()


def trained(run_dir: RunDir) -> Tracker:
    """A start that has trained, and written a model and a report in the order in which training does."""
    tracker = tracker_of(run_dir, None)
    tracker.start({"seed": "1"}, {}, "model: base\n")
    train(MetricsLog(run_dir.metrics), range(1, 21))
    run_dir.model.mkdir()
    for file in (run_dir.model / "content", run_dir.report):
        file.write_text("content")
    tracker.model_written(run_dir.model)
    tracker.report_written()
    return tracker


@pytest.mark.slow
def test_status_points_and_report_are_there_before_the_upload_of_the_model_begins(
    stored_run_dir: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def look_around(run: TrackedRun, model: Any) -> None:
        seen.append(client.get_run(run.run_id).info.status)
        seen.append(curves_on_server(store_of(stored_run_dir), run.run_id))
        seen.append("report.html" in [file.path for file in client.list_artifacts(run.run_id)])

    monkeypatch.setattr(shipper, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mlflow_models, "log_model", look_around)
    tracker = trained(stored_run_dir)
    wait_until(lambda: sent_step(stored_run_dir) == 20)  # and so it has looked at the model, long before the end
    tracker.close("FINISHED")
    assert seen == ["FINISHED", curves_in_file(stored_run_dir), True]


@pytest.mark.slow
def test_a_server_that_answers_again_is_waited_for_while_it_takes_data_and_gets_the_status_first(
    stored_run_dir: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage of checkpoints until the run ends, without a model; what waits takes longer than close_seconds."""
    deliver, log_reference = shipper.Shipper.deliver, mlflow_models.log_reference
    status_before: list[str] = []
    channels_of_pass: list[Any] = []

    def noting(of_run: shipper.Shipper, channels: Any) -> Any:
        channels_of_pass.append(channels)
        return deliver(of_run, channels)

    def down_then_slow(run: TrackedRun, *arguments: Any) -> None:
        if channels_of_pass[-1] != CHANNELS:  # a pass that began before the end of the run
            raise ServerTrouble("down")
        status_before.append(client.get_run(run.run_id).info.status)
        time.sleep(0.2)
        log_reference(run, *arguments)

    monkeypatch.setattr(shipper.Shipper, "deliver", noting)
    monkeypatch.setattr(mlflow_models, "log_reference", down_then_slow)
    monkeypatch.setattr(shipper, "ANSWER_SECONDS", 600)  # however slow the machine is
    monkeypatch.setattr("dist_transformer.tracking.tracker.BUSY_SECONDS", 600)
    tracker = tracker_of(stored_run_dir, None, close_seconds=1)
    tracker.start({}, {}, "")
    for step in range(1, 8):
        save_checkpoint(tracker, stored_run_dir.path, step)
    train(MetricsLog(stored_run_dir.metrics), range(1, 21))
    wait_until(lambda: sent_step(stored_run_dir) == 20)
    tracker.close("FINISHED")
    assert status_before == ["FINISHED"] * 7
    assert has_arrived(stored_run_dir)


def wait_for_the_threads_of(run_dir: RunDir) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tracking"):
            thread.join()


@pytest.mark.slow
def test_a_thread_that_was_given_up_sends_nothing_beside_the_next_one_of_its_run(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    """As after a divergence: the server takes long for some points, training goes back and begins again."""
    log_points, senders = TrackedRun.log_points, []
    hangs, given_up = threading.Event(), threading.Event()

    def hang_once(run: TrackedRun, points: list[Point]) -> None:
        senders.append(threading.current_thread())
        if len(senders) == 1:
            hangs.set()
            given_up.wait()
            release.wait(HELD_SECONDS)
        log_points(run, points)
        if senders[0] is not threading.current_thread():
            release.set()

    monkeypatch.setattr("dist_transformer.tracking.outbox.POINTS_A_BATCH", 5)
    monkeypatch.setattr(TrackedRun, "log_points", hang_once)
    first, log = tracker_of(stored_run_dir, None, close_seconds=1), MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 21))
    first.start({}, {}, "")
    hangs.wait()
    first.close("SCHEDULED")
    given_up.set()
    log.rewind(12)
    second = tracker_of(stored_run_dir, None)
    second.start({}, {}, "")
    train(log, range(13, 31))
    second.close("FINISHED")
    wait_for_the_threads_of(stored_run_dir)
    assert senders.count(senders[0]) == 1
    assert curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir)) == curves_in_file(stored_run_dir)


@pytest.mark.slow
def test_a_report_that_is_gone_is_left_out_with_one_warning_and_cost_no_second_opening(
    stored_run_dir: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    openings = []
    open_run = mlflow_client.open_run

    def counted(target: Target, memory: DeliveryState) -> TrackedRun:
        openings.append(target)
        return open_run(target, memory)

    monkeypatch.setattr(mlflow_client, "open_run", counted)
    tracker = tracker_of(stored_run_dir, None)
    tracker.start({}, {}, "")
    tracker.report_written()
    tracker.close("FINISHED")
    assert client.get_run(run_id_of(stored_run_dir)).info.status == "FINISHED"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "report.html" in warning
    assert len(openings) == 1


class NotingRun:
    """A run on a server that takes everything."""

    run_id = "a run"

    def newest_step(self, event: str) -> int:
        return 10**9

    def log_points(self, points: list[Point]) -> None:
        pass

    def remove_doubles(self, run_id: str) -> None:
        pass


SPOOL = (
    "start",
    "checkpoint",
    "samples",
    "model",
    "status",
    "start",
    "samples",
    "checkpoint",
    "model",
    "figures",
    "status",
)


@pytest.fixture
def notes(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Lane and number of each event of SPOOL as it is delivered."""
    noted: list[tuple[str, int]] = []

    def note(run: NotingRun, event: Mapping[str, Any], lane: str, folder: RunDir) -> None:
        noted.append((lane, event["number"]))

    monkeypatch.setattr(mlflow_client, "open_run", lambda target, memory: NotingRun())
    monkeypatch.setattr(shipper, "send_event", note)
    for number, event in enumerate(SPOOL):
        add_event(run_dir.tracking_events, event, {"number": number})
    return noted


def shipper_of(run_dir: RunDir) -> Shipper:
    """As a process that begins has it."""
    target = Target("http://server", "experiment", Path("artifacts"))
    return Shipper(run_dir, target, load_delivery_state(run_dir.tracking, "a run"))


IN_ORDER = [
    ("status", 10),  # which 0, 4 and 5 would show for a while, or for good if the shipper were killed then
    *[("words", number) for number in (0, 1, 5, 7)],
    *[("files", number) for number in (0, 5, 6)],  # 6 sends the samples of 2 too
    ("figures", 9),
    *[("model", number) for number in (3, 8)],
]


def test_the_status_goes_before_words_before_files_before_reports_before_models_each_in_order(
    run_dir: RunDir, notes: list[tuple[str, int]]
) -> None:
    assert shipper_of(run_dir).deliver().events == len({number for _, number in IN_ORDER})
    assert notes == IN_ORDER
    assert shipper_of(run_dir).deliver().events == 0
    assert load_delivery_state(run_dir.tracking, "").outbox_offset == run_dir.tracking_events.stat().st_size


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_kill_at_any_moment_loses_nothing_and_repeats_the_one_event_that_was_under_way(
    run_dir: RunDir, notes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """`is_kept`: killed just after tracking.json was replaced, else just before. One event a life of the process."""
    save = DeliveryState.save

    def killed(memory: DeliveryState, path: Path) -> None:
        if is_kept or len(notes) % 2 == 0:
            save(memory, path)
        if notes:
            raise KeyboardInterrupt

    monkeypatch.setattr(DeliveryState, "save", killed)
    for _ in range(2 * len(IN_ORDER)):
        if len(set(notes)) < len(IN_ORDER):
            one = shipper_of(run_dir)
            one._run = NotingRun()  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                one.deliver()
    monkeypatch.undo()
    assert sorted(set(notes), key=IN_ORDER.index) == list(dict.fromkeys(notes)) == IN_ORDER
    assert len(notes) == (1 if is_kept else 2) * len(IN_ORDER) - (0 if is_kept else 1)


def test_a_store_of_files_that_is_down_holds_up_no_status_not_even_of_the_next_start(
    run_dir: RunDir, notes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(run: Any, event: Mapping[str, Any], lane: str, folder: RunDir) -> None:
        if lane not in ("status", "words"):
            raise ServerTrouble("the artifact store is down")
        notes.append((lane, event["number"]))

    with monkeypatch.context() as patch:
        patch.setattr(shipper, "send_event", down)
        for _ in range(2):
            with pytest.raises(ServerTrouble):
                shipper_of(run_dir).deliver()
    assert notes == [part for part in IN_ORDER if part[0] in ("status", "words")]
    shipper_of(run_dir).deliver()
    assert notes == IN_ORDER


def test_a_memory_of_before_there_were_lanes_is_read(run_dir: RunDir) -> None:
    write_json(run_dir.tracking, {"run_name": "a run", "spool_offset": 17})
    memory = load_delivery_state(run_dir.tracking, "")
    assert [memory.offset(lane) for lane in CHANNELS] == [17] * len(CHANNELS)
