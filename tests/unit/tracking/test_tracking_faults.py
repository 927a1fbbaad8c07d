"""Against a real server behind a proxy that does wrong: whatever is answered, and after whatever delay, every point gets
there once and no step of training waits. The tests share the server."""

import logging
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from faulty_proxy import Fault, Proxy
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND, INVALID_PARAMETER_VALUE
from mlflow_server import Server, wait_until
from tracking_helpers import (
    assert_complete,
    assert_never_held_up,
    curves_in_file,
    curves_on_server,
    run_id_of,
    save_checkpoint,
    sent_step,
    tracker_of,
    train,
    train_while,
)

from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.tracking import shipper
from dist_transformer.tracking.mlflow_client import RUN_UID_TAG, translated_errors
from dist_transformer.tracking.outbox import CannotBeSent, ServerRefused, ServerTrouble
from dist_transformer.tracking.tracker import Tracker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("impatience")]

POINTS = "runs/log-batch"


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of its own, where one may be mounted here; else a folder."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    subprocess.run(command, check=False, capture_output=True)
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)  # the killed server may still be ending


@pytest.fixture(scope="module")
def server(small_disk: Path, empty_database: Path) -> Iterator[Server]:
    shutil.copy(empty_database, small_disk / "server.db")
    server = Server(small_disk, f"sqlite:///{small_disk}/server.db")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


def following(run_dir: RunDir, uri: str) -> tuple[Tracker, MetricsLog]:
    tracker = tracker_of(run_dir, uri)
    tracker.start({"seed": "1"}, {}, "model: base\n")
    return tracker, MetricsLog(run_dir.metrics)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (record for record in caplog.records if record.name.startswith("dist_transformer"))
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_errors_for_a_while_cost_nothing_and_are_told_once(
    server: Server, proxy: Proxy, run_dir: RunDir, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    tracker, log = following(run_dir, proxy.uri)
    train(log, range(1, 11))
    wait_until(lambda: sent_step(run_dir) == 10)
    proxy.set_fault(Fault(status=status))
    seconds = train_while(log, tracker, 11, lambda: proxy.met < 3 or not warnings(caplog))
    proxy.set_fault(None)
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert_never_held_up(seconds)
    first, last = warnings(caplog)
    assert "takes no data" in first
    assert str(status) in first
    assert "caught up" in last


def test_a_server_a_second_slower_holds_up_no_step(server: Server, proxy: Proxy, run_dir: RunDir) -> None:
    proxy.set_fault(Fault(delay_seconds=1.0))
    tracker, log = following(run_dir, proxy.uri)
    seconds = train_while(log, tracker, 1, lambda: proxy.met < 5)
    proxy.set_fault(None)
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert_never_held_up(seconds)


@pytest.mark.parametrize("is_set_back", [False, True])
def test_a_batch_whose_confirmation_is_lost_is_stored_once(
    server: Server, proxy: Proxy, run_dir: RunDir, is_set_back: bool
) -> None:
    """Set back meanwhile, training writes the same steps again, later: the server keeps those that it has."""
    tracker, log = following(run_dir, proxy.uri)
    train(log, range(1, 11))
    wait_until(lambda: sent_step(run_dir) == 10)
    proxy.set_fault(Fault(only=POINTS, is_cut=True))
    train(log, range(11, 21))
    wait_until(lambda: proxy.met > 0)
    if is_set_back:
        log.rewind(15)
        train(log, range(16, 31))
    proxy.set_fault(None)
    tracker.close("FINISHED")
    curves = curves_on_server(server.uri, run_id_of(run_dir))
    assert [(step, value) for step, value, _ in curves["train/loss"]] == [
        (step, 10 / step) for step in range(1, 31 if is_set_back else 21)
    ]
    assert is_set_back or curves == curves_in_file(run_dir)


def test_a_run_every_first_confirmation_of_which_is_lost_is_there_once_with_all_that_belongs_to_it(
    server: Server, proxy: Proxy, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(shipper, "LONGEST_WAIT_SECONDS", 0.05)
    proxy.set_fault(Fault(is_rank_zero=True, is_cut=True))
    tracker, log = following(run_dir, proxy.uri)
    train(log, range(1, 31))
    for step in (10, 20, 30):
        save_checkpoint(tracker, run_dir.path, step)
    tracker.close("FINISHED")
    assert proxy.met > 8
    client = MlflowClient(tracking_uri=server.uri)
    run = the_run_of(client, run_dir)
    assert (run.info.status, run.data.params) == ("FINISHED", {"seed": "1"})
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert sorted(model.name for model in models) == ["step_00000010", "step_00000020", "step_00000030"]
    assert len(client.get_metric_history(run.info.run_id, "checkpoint/loss")) == 3
    assert_complete(server.uri, run_dir)


def the_run_of(client: MlflowClient, run_dir: RunDir) -> Run:
    """There must be one with its tag."""
    experiment = client.get_run(run_id_of(run_dir)).info.experiment_id
    (run,) = client.search_runs([experiment], f"tags.`{RUN_UID_TAG}` = '{read_json(run_dir.tracking)['run_uid']}'")
    return run


def test_a_run_made_after_its_request_was_given_up_does_not_stay_beside_ours(
    server: Server, proxy: Proxy, run_dir: RunDir
) -> None:
    proxy.set_fault(Fault(only="runs/create", is_held=True))
    tracker, log = following(run_dir, proxy.uri)
    train(log, range(1, 11))
    wait_until(lambda: proxy.met > 0)
    proxy.set_fault(None)
    wait_until(lambda: sent_step(run_dir) == 10)
    assert proxy.release() > 0
    tracker.close("FINISHED")
    assert the_run_of(MlflowClient(tracking_uri=server.uri), run_dir).info.run_id == run_id_of(run_dir)
    assert_complete(server.uri, run_dir)


def test_an_upload_that_is_too_large_for_a_proxy_does_not_hold_up_what_follows(
    server: Server, proxy: Proxy, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.set_fault(Fault(only="mlflow-artifacts", status=413, body="<h1>413 Request Entity Too Large</h1>"))
    tracker, log = following(run_dir, proxy.uri)
    train(log, range(1, 11))
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert MlflowClient(tracking_uri=server.uri).get_run(run_id_of(run_dir)).info.status == "FINISHED"
    assert "refused the event 'start', which is skipped" in caplog.text
    assert "413" in caplog.text


def test_a_server_without_logged_models_is_one_warning_and_gets_all_else(
    server: Server, proxy: Proxy, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.set_fault(Fault(only="logged-models", status=404, body="<title>404 Not Found</title>"))
    tracker, log = following(run_dir, proxy.uri)
    train(log, range(1, 11))
    for step in (5, 10):
        save_checkpoint(tracker, run_dir.path, step)
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    run = MlflowClient(tracking_uri=server.uri).get_run(run_id_of(run_dir))
    assert (run.info.status, run.data.tags["best_checkpoint"]) == ("FINISHED", "step_00000010")
    (warning,) = (each for each in warnings(caplog) if "which is skipped" in each)
    assert "refused the event 'checkpoint'" in warning
    assert "a server older than MLflow 3 has none" in warning


def refusal(error: MlflowException, cause: MlflowException | None = None) -> ServerTrouble:
    with pytest.raises(ServerTrouble) as found, translated_errors():
        raise error from cause
    return found.value


def test_what_a_proxy_answers_for_a_while_is_no_final_refusal_of_a_checkpoint() -> None:
    """Without a route to its server it answers 404; MLflow takes any error before it sets a tag for a wrong argument."""
    missing = "API request to endpoint /api/2.0/mlflow/logged-models failed with error code 404 != 200"
    assert not isinstance(refusal(MlflowException(missing, ENDPOINT_NOT_FOUND)), CannotBeSent)
    wrapped = MlflowException("Failed to get logged model with ID m-1", INVALID_PARAMETER_VALUE)
    assert isinstance(refusal(wrapped), ServerRefused)
    assert not isinstance(refusal(wrapped, MlflowException("too many 500 error responses")), ServerRefused)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("body", ["You are not authenticated.", '{"error_code": "PERMISSION_DENIED", "message": "no"}'])
def test_wrong_credentials_are_one_warning_that_says_what_to_set(
    server: Server, proxy: Proxy, run_dir: RunDir, caplog: pytest.LogCaptureFixture, status: int, body: str
) -> None:
    proxy.set_fault(Fault(status=status, body=body))
    tracker, log = following(run_dir, proxy.uri)
    seconds = train_while(log, tracker, 1, lambda: not warnings(caplog))
    (warning,) = warnings(caplog)
    for variable in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        assert variable in warning
    proxy.set_fault(None)  # the server's owner has let us in
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert_never_held_up(seconds)


def test_a_certificate_that_nobody_trusts_is_named_with_the_variable_that_trusts_it(
    server: Server, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = self_signed(tmp_path)
    with Proxy(server.port, certificate) as proxy:
        tracker, log = following(run_dir, proxy.uri)
        seconds = train_while(log, tracker, 1, lambda: not warnings(caplog))
        (warning,) = warnings(caplog)
        assert "certificate verify failed" in warning
        assert "MLFLOW_TRACKING_SERVER_CERT_PATH" in warning
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
        tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert_never_held_up(seconds)


def self_signed(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1 in one file."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "certificate.pem").read_text() + (folder / "key.pem").read_text())
    return both


def test_a_server_whose_disk_is_full_takes_all_once_there_is_space(
    server: Server, run_dir: RunDir, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not small_disk.is_mount():
        pytest.skip("mounting a small disk needs root")
    tracker, log = following(run_dir, server.uri)
    train(log, range(1, 11))
    wait_until(lambda: sent_step(run_dir) == 10)
    filler = small_disk / "filler"
    try:
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}"], check=False, capture_output=True)  # until it is full
        seconds = train_while(log, tracker, 11, lambda: not warnings(caplog))
        save_checkpoint(tracker, run_dir.path, 10)
    finally:
        filler.unlink()
    assert "disk is full" in warnings(caplog)[0]
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert_never_held_up(seconds)


def test_a_server_restored_from_an_old_backup_gets_again_what_it_lost(
    server: Server, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    database = server.folder / "server.db"
    tracker, log = following(run_dir, server.uri)
    train(log, range(1, 11))
    wait_until(lambda: sent_step(run_dir) == 10)
    backup = run_dir.path / "backup.db"
    with closing(sqlite3.connect(database)) as now, closing(sqlite3.connect(backup)) as copy:
        now.backup(copy)
    train(log, range(11, 1001))
    wait_until(lambda: sent_step(run_dir) == 1000)
    server.kill()
    told = len(warnings(caplog))
    try:
        shutil.copy(backup, database)
        train(log, range(1001, 1011))
        wait_until(lambda: len(warnings(caplog)) > told)
    finally:
        server.start()
    tracker.close("FINISHED")
    assert_complete(server.uri, run_dir)
    assert "lost points" in caplog.text
