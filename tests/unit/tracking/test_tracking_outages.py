"""Servers that do not answer, or are not MLflow, and faults of tracking itself: training goes on, and nothing is forgotten."""

import logging
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from mlflow import MlflowClient
from mlflow_server import wait_until
from tracking_helpers import (
    curves_in_file,
    curves_on_server,
    run_id_of,
    save_checkpoint,
    sent_step,
    settings_of,
    started,
    store_of,
    tracker_of,
    train,
)

from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.tracking import shipper
from dist_transformer.tracking.mlflow_client import TrackedRun, artifact_errors, patient_requests
from dist_transformer.tracking.outbox import Point, ServerTrouble
from dist_transformer.tracking.tracker import sync


@pytest.fixture
def client(stored_run_dir: RunDir) -> MlflowClient:
    return MlflowClient(tracking_uri=store_of(stored_run_dir))


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Connections are opened and nothing is ever answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
def test_an_address_that_never_answered_is_not_remembered(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    tracker = started(stored_run_dir)
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    tracker.close("FINISHED")
    before = stored_run_dir.tracking.read_bytes()
    with pytest.raises(UserError, match="no server answers"):
        sync(stored_run_dir, settings_of("http://127.0.0.1:9"), stored_run_dir.path.parent)
    assert stored_run_dir.tracking.read_bytes() == before
    sent = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert (sent.points, sent.events) == (0, 0)


def test_a_server_that_is_not_mlflow_is_not_remembered(stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped address, where something else takes every request."""
    answers = dict.fromkeys([b"", b"{}"], "its answers are not those of MLflow")
    answers |= {b"[]": "not in a valid JSON format", b'{"experiment": 3}': "ParseError: Failed to parse experiment"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(server.answer)  # type: ignore[attr-defined]

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    tracker = started(stored_run_dir)
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    tracker.close("FINISHED")
    before = stored_run_dir.tracking.read_bytes()
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for server.answer, told in answers.items():  # type: ignore[attr-defined]
            with pytest.raises(UserError, match=f"Its answer: .*{told}"):
                sync(stored_run_dir, settings_of(f"http://127.0.0.1:{server.server_port}"), stored_run_dir.path.parent)
            assert stored_run_dir.tracking.read_bytes() == before
        server.shutdown()


@pytest.mark.parametrize(("count", "told"), [(1, []), (4, ["takes no data", "caught up"])])
def test_one_warning_and_one_line_of_relief_for_an_outage_and_none_for_a_single_failure(
    stored_run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
    told: list[str],
) -> None:
    monkeypatch.setattr(shipper, "FIRST_WAIT_SECONDS", 0.01)
    failures = iter(range(count))
    log_points = TrackedRun.log_points

    def fail_at_first(run: TrackedRun, points: list[Point]) -> None:
        if next(failures, None) is not None:
            raise OSError("database is locked")
        log_points(run, points)

    monkeypatch.setattr(TrackedRun, "log_points", fail_at_first)
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    tracker = started(stored_run_dir)
    wait_until(lambda: sent_step(stored_run_dir) == 5)
    tracker.close("FINISHED")
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == len(told)
    assert all(words in warning for words, warning in zip(told, warnings, strict=True))


def test_a_bug_in_tracking_is_shown_with_its_traceback_and_training_goes_on(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run: TrackedRun, points: list[Point]) -> None:
        raise ZeroDivisionError("at http://user:secret@host")

    monkeypatch.setattr(TrackedRun, "log_points", broken)
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    started(stored_run_dir).close("FINISHED")
    assert caplog.text.count("ZeroDivisionError: at http://host") == 1
    assert "track sync" in caplog.text


def test_a_silent_server_stops_neither_training_nor_its_end(
    run_dir: RunDir, silent_address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    caplog.set_level(logging.DEBUG)
    uri = f"http://somebody:secret@{silent_address}"
    tracker = tracker_of(run_dir, uri, close_seconds=1)
    log = MetricsLog(run_dir.metrics)
    tracker.start({"tracking.uri": uri}, {"uri": uri}, f"tracking:\n  uri: {uri}\n")
    for step in range(1, 201):
        log.append("train", step, {"loss": 1.0})
        save_checkpoint(tracker, run_dir.path, step)
    tracker.close("FAILED")
    waiting = [each for each in threading.enumerate() if each.name == f"tracking {run_dir.path.absolute()}"]
    assert waiting, "no step and no end waited for the first answer, which has not come"
    assert "track sync" in caplog.text
    written = [caplog.text, *(path.read_text() for path in run_dir.path.rglob("*") if path.is_file())]
    assert all("secret" not in text for text in written)


def test_sync_reports_the_answer_of_a_server_that_is_not_there(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError) as raised:
            sync(run_dir, settings_of(f"http://user:secret@{address}"), run_dir.path.parent)
    assert all(part in str(raised.value) for part in (address, str(run_dir.path), "refused", "run the command again"))
    assert "secret" not in str(raised.value)


def test_sync_of_a_folder_that_cannot_be_written_does_not_blame_the_server(stored_run_dir: RunDir) -> None:
    stored_run_dir.tracking.mkdir()  # so that root cannot write it either
    with pytest.raises(UserError, match=r"the run folder cannot be read or written: .*Is a directory") as raised:
        sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert "as the owner of the folder" in str(raised.value)
    assert "Its answer" not in str(raised.value)


def test_what_a_database_refuses_is_one_answer_without_a_traceback_of_mlflow(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    train(MetricsLog(stored_run_dir.metrics), range(1, 3))
    with closing(sqlite3.connect(stored_run_dir.path.parent / "mlflow.db")) as store:
        store.execute("DROP TABLE latest_metrics")
    with pytest.raises(UserError, match="no such table"):
        sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"), [("MLFLOW_HTTP_REQUEST_TIMEOUT", "2.5"), ("MLFLOW_TRACKING_INSECURE_TLS", "yes")]
)
def test_a_variable_that_mlflow_cannot_read_is_named_and_is_no_error_of_ours(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    monkeypatch.setenv(variable, value)
    tracker = tracker_of(run_dir, "http://127.0.0.1:9", close_seconds=1)
    tracker.start({}, {}, "")
    wait_until(lambda: variable in caplog.text)
    tracker.close("FINISHED")
    assert "error of ours" not in caplog.text
    with pytest.raises(UserError, match=f"Its answer: .*{value}.*{variable}|Its answer: .*{variable}.*{value}"):
        sync(run_dir, settings_of("http://127.0.0.1:9"), run_dir.path.parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("http://[::1:5", "IPv6"),
        ("http://h\u2100x:5", "netloc"),
        ("mysql://h/x", "MySQLdb.*in the environment that trains"),
    ],
)
def test_an_address_that_mlflow_cannot_use_here_is_one_warning_and_no_error_of_ours(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, answer: str
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_WAIT_SECONDS", 0.01)
    monkeypatch.setitem(sys.modules, "MySQLdb", None)  # as where it is not installed
    tracker = tracker_of(run_dir, address, close_seconds=1)
    tracker.start({}, {}, "")
    wait_until(lambda: "Its answer" in caplog.text or "error of ours" in caplog.text)
    tracker.close("FINISHED")
    assert "error of ours" not in caplog.text
    assert caplog.text.count("Its answer") == 1
    with pytest.raises(UserError, match=f"Its answer: .*{answer}"):
        sync(run_dir, settings_of(address), run_dir.path.parent)


def test_an_upload_names_the_time_limit_that_mlflow_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2.5")
    with pytest.raises(ServerTrouble, match="MLFLOW_HTTP_REQUEST_TIMEOUT"), artifact_errors(), patient_requests(1):
        pass


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'boto3'"), RuntimeError("no credentials")])
def test_an_artifact_store_that_takes_nothing_holds_up_neither_the_curves_nor_the_status(
    stored_run_dir: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    train(MetricsLog(stored_run_dir.metrics), range(1, 4))
    tracker = tracker_of(stored_run_dir, None, close_seconds=600)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(MlflowClient, "log_text", refuse)
        tracker.start({}, {}, "model: base\n")
        closed = pool.submit(tracker.close, "FINISHED")
        try:
            wait_until(lambda: sent_step(stored_run_dir) == 3)
            wait_until(lambda: client.get_run(run_id_of(stored_run_dir)).info.status == "FINISHED")
            assert curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir)) == curves_in_file(
                stored_run_dir
            )
            if isinstance(error, RuntimeError):  # for want of a package the configuration is skipped
                assert not closed.done(), "the configuration has not been taken"
        finally:
            patch.undo()  # so that it is taken, and the end comes
            closed.result()
