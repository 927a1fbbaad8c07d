"""Against a real sqlite store, which needs no server."""

import errno
import math
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    train,
)

from dist_transformer import files
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event, read_records
from dist_transformer.tracking import mlflow_client, shipper
from dist_transformer.tracking.final_status import has_arrived
from dist_transformer.tracking.outbox import DeliveryState
from dist_transformer.tracking.tracker import Status, sync, target_of


@pytest.fixture
def client(stored_run_dir: RunDir) -> MlflowClient:
    return MlflowClient(tracking_uri=store_of(stored_run_dir))


def test_the_curves_of_a_run_are_those_of_its_file(stored_run_dir: RunDir) -> None:
    tracker = started(stored_run_dir)
    train(MetricsLog(stored_run_dir.metrics), range(1, 700))
    tracker.close("FINISHED")
    assert curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir)) == curves_in_file(stored_run_dir)


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED", "SCHEDULED"])
def test_closing_sets_the_status_on_the_server(stored_run_dir: RunDir, client: MlflowClient, status: Status) -> None:
    started(stored_run_dir).close(status)
    assert client.get_run(run_id_of(stored_run_dir)).info.status == status


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)], ids=["of a group", "private"])
def test_who_may_write_into_a_new_store_is_a_matter_of_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, mode: int
) -> None:
    """Left to itself, sqlite makes a file that nobody else may write."""

    def client(tracking_uri: str) -> Mock:
        with closing(sqlite3.connect(tracking_uri.removeprefix("sqlite:///"))) as store:
            store.execute("CREATE TABLE experiments (name)")
        return Mock()

    monkeypatch.setattr(mlflow_client, "MlflowClient", client)
    before = os.umask(umask)
    try:
        mlflow_client._create_database(tmp_path / "mlflow.db")
    finally:
        os.umask(before)
    assert (tmp_path / "mlflow.db").stat().st_mode & 0o777 == mode
    assert (tmp_path / "mlflow.db").stat().st_size


@pytest.mark.parametrize("failures", [1, 2, 10**6])
def test_events_that_the_disk_does_not_take_are_written_with_later_ones(
    stored_run_dir: RunDir,
    client: MlflowClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failures: int,
) -> None:
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))
    left, opened = [failures], Path.open

    def stuttering(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if path == stored_run_dir.tracking_events and mode != "rb" and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", stuttering)
    tracker = started(stored_run_dir, {"seed": "1"})  # with 1 failure they come with the status, with 2 at the next try
    train(MetricsLog(stored_run_dir.metrics), range(1, 3))
    tracker.close("FINISHED")
    assert "kept in memory until the disk takes them" in caplog.text
    assert ("its last events are lost" in caplog.text) == (failures > 2)
    if failures <= 2:
        run = client.get_run(run_id_of(stored_run_dir))
        assert (run.data.params, run.info.status) == ({"seed": "1"}, "FINISHED")
        assert [record["event"] for record in read_records(stored_run_dir.tracking_events)] == ["start", "status"]


def test_a_second_start_continues_the_run_and_a_changed_parameter_becomes_a_tag(
    stored_run_dir: RunDir, client: MlflowClient
) -> None:
    started(stored_run_dir, {"seed": "1", "model.d_model": "512", "long": "x" * 900}).close("SCHEDULED")
    first = run_id_of(stored_run_dir)
    tracker = started(stored_run_dir, {"seed": "2", "model.d_model": "512", "long": "x" * 900, "new": "3"})
    wait_until(lambda: client.get_run(first).info.status == "RUNNING")
    tracker.close("FINISHED")
    data = client.get_run(first).data
    assert run_id_of(stored_run_dir) == first
    assert data.params == {"seed": "1", "model.d_model": "512", "long": "x" * 500, "new": "3"}
    assert {k: v for k, v in data.tags.items() if k.startswith("param_drift")} == {"param_drift.seed": "1 -> 2"}
    assert data.tags["slurm.job_id"] == "7"


def test_after_a_rewind_every_step_stands_once_on_the_server(stored_run_dir: RunDir) -> None:
    tracker = started(stored_run_dir)
    log = MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 21))
    tracker.close("SCHEDULED")
    log.rewind(12)
    tracker = started(stored_run_dir)
    train(log, range(13, 31))
    tracker.close("FINISHED")
    curves = curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))
    assert [step for step, _, _ in curves["train/loss"]] == list(range(1, 31))
    assert [step for step, _, _ in curves["validation/loss"]] == list(range(5, 31, 5))


def test_a_rewind_while_the_tracker_runs_repeats_and_loses_nothing(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "POLL_SECONDS", 0.05)
    tracker = started(stored_run_dir)
    log = MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 21))
    wait_until(lambda: sent_step(stored_run_dir) == 20)
    log.rewind(12)
    train(log, range(13, 31))
    tracker.close("FINISHED")
    curve = curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))["train/loss"]
    assert [(step, value) for step, value, _ in curve] == [(step, 10 / step) for step in range(1, 31)]


def test_a_file_set_back_again_and_again_between_two_passes_is_read_anew(stored_run_dir: RunDir) -> None:
    """A new file may get the number that one before it had."""
    target = target_of(settings_of(None), stored_run_dir, stored_run_dir.path.parent)
    memory, log = DeliveryState("a run"), MetricsLog(stored_run_dir.metrics)
    passes = shipper.Shipper(stored_run_dir, target, memory)
    for step in range(1, 21):
        log.append("train", step, {"loss": 10 / step, "text": "a line longer than those after it" * 20})
    passes.deliver()
    first = log.path.stat().st_ino
    for _ in range(20):
        log.rewind(15)
        train(log, range(16, 61))
        if log.path.stat().st_ino == first:
            break
    passes.deliver()
    curve = curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))["train/loss"]
    assert [(step, value) for step, value, _ in curve] == [(step, 10 / step) for step in range(1, 61)]


def test_a_file_whose_handle_went_stale_is_opened_anew(stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk whose server failed over: the path is well, the handle is not known any more."""
    target = target_of(settings_of(None), stored_run_dir, stored_run_dir.path.parent)
    log, fstat = MetricsLog(stored_run_dir.metrics), os.fstat
    passes = shipper.Shipper(stored_run_dir, target, DeliveryState("a run"))
    train(log, range(1, 11))
    passes.deliver()
    stale = passes._file
    assert stale is not None

    def refusing(number: int) -> os.stat_result:
        if passes._file is stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return fstat(number)

    monkeypatch.setattr(os, "fstat", refusing)
    train(log, range(11, 21))
    passes.deliver()
    curve = curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))["train/loss"]
    assert [step for step, _, _ in curve] == list(range(1, 21))


def test_a_crash_before_the_memory_was_saved_repeats_nothing(stored_run_dir: RunDir, client: MlflowClient) -> None:
    tracker = started(stored_run_dir)
    train(MetricsLog(stored_run_dir.metrics), range(1, 11))
    save_checkpoint(tracker, stored_run_dir.path, 10)
    tracker.close("FINISHED")
    memory = read_json(stored_run_dir.tracking)
    write_json(stored_run_dir.tracking, memory | {"sent": {}, "spool_offset": 0, "run_id": None})
    delivery = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert delivery.run_id == memory["run_id"]
    assert curves_on_server(store_of(stored_run_dir), memory["run_id"]) == curves_in_file(stored_run_dir)
    assert len(client.get_metric_history(memory["run_id"], "checkpoint/loss")) == 1
    assert len(client.search_logged_models([client.get_run(memory["run_id"]).info.experiment_id])) == 1


def test_values_that_are_not_finite_stay_local(stored_run_dir: RunDir) -> None:
    tracker = started(stored_run_dir)
    MetricsLog(stored_run_dir.metrics).append("train", 1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    tracker.close("FINISHED")
    assert set(curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))) == {"train/lr"}


def test_the_best_checkpoint_is_found_by_its_score(stored_run_dir: RunDir, client: MlflowClient) -> None:
    tracker = started(stored_run_dir)
    for step, bleu in [(10, 20.5), (20, 27.25), (30, 26.0)]:
        path = stored_run_dir.checkpoints / f"step_{step:08d}"
        tracker.checkpoint_saved(step, path, {"bleu": bleu, "loss": math.nan}, is_best=False, kept=[path.name])
    tracker.close("FINISHED")
    experiment = client.get_run(run_id_of(stored_run_dir)).info.experiment_id
    order = [{"field_name": "metrics.checkpoint/bleu", "ascending": False}]
    best = client.search_logged_models([experiment], order_by=order)[0]
    assert best.name == "step_00000020"
    assert best.params == {"path": str(stored_run_dir.checkpoints / best.name), "step": "20"}
    assert best.source_run_id == run_id_of(stored_run_dir)


def test_an_event_that_can_never_be_taken_does_not_hold_up_the_others(
    stored_run_dir: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = started(stored_run_dir)
    tracker.model_written(stored_run_dir.path / "gone")
    tracker.close("FINISHED")
    assert client.get_run(run_id_of(stored_run_dir)).info.status == "FINISHED"
    assert "gone is not there any more" in caplog.text


@pytest.mark.parametrize("is_all", [False, True])
def test_a_run_deleted_on_the_server_is_restored(stored_run_dir: RunDir, client: MlflowClient, is_all: bool) -> None:
    """`is_all`: its whole experiment was deleted."""
    started(stored_run_dir).close("SCHEDULED")
    run_id = run_id_of(stored_run_dir)
    experiment_id = client.get_run(run_id).info.experiment_id
    if is_all:
        client.delete_experiment(experiment_id)
    else:
        client.delete_run(run_id)
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    started(stored_run_dir).close("FINISHED")
    assert run_id_of(stored_run_dir) == run_id
    assert client.get_run(run_id).info.lifecycle_stage == "active"
    assert client.get_experiment(experiment_id).lifecycle_stage == "active"
    assert curves_on_server(store_of(stored_run_dir), run_id) == curves_in_file(stored_run_dir)


@pytest.mark.slow
@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("is_all", [False, True])
def test_a_run_deleted_while_it_trains_is_restored_before_its_end_and_has_every_point(
    stored_run_dir: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture, is_all: bool
) -> None:
    """`is_all`: with its experiment."""
    tracker, log = started(stored_run_dir), MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 6))
    wait_until(lambda: sent_step(stored_run_dir) == 5)
    run_id = run_id_of(stored_run_dir)
    if is_all:
        client.delete_experiment(client.get_run(run_id).info.experiment_id)
    else:
        client.delete_run(run_id)
    train(log, range(6, 11))
    wait_until(lambda: sent_step(stored_run_dir) == 10)
    assert client.get_run(run_id).info.lifecycle_stage == "active"
    assert curves_on_server(store_of(stored_run_dir), run_id) == curves_in_file(stored_run_dir)
    tracker.close("FINISHED")
    assert "skipped" not in caplog.text


@pytest.mark.usefixtures("impatience")
def test_what_a_backup_restored_while_the_run_trains_takes_from_the_middle_is_found_by_sync(
    stored_run_dir: RunDir, client: MlflowClient, tmp_path: Path
) -> None:
    tracker, log = started(stored_run_dir), MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 6))
    wait_until(lambda: sent_step(stored_run_dir) == 5)
    database = stored_run_dir.path.parent / "mlflow.db"
    with closing(sqlite3.connect(database)) as store, closing(sqlite3.connect(tmp_path / "backup.db")) as backup:
        store.backup(backup)
        train(log, range(6, 11))
        save_checkpoint(tracker, stored_run_dir.path, 8)
        wait_until(lambda: sent_step(stored_run_dir) == 10 and has_arrived(stored_run_dir))
        backup.backup(store)
    train(log, range(11, 16))
    tracker.close("FINISHED")
    run_id = run_id_of(stored_run_dir)
    assert curves_on_server(store_of(stored_run_dir), run_id) != curves_in_file(stored_run_dir)
    assert sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).points > 0
    assert curves_on_server(store_of(stored_run_dir), run_id) == curves_in_file(stored_run_dir)
    run = client.get_run(run_id)
    assert [each.name for each in client.search_logged_models([run.info.experiment_id])] == ["step_00000008"]
    assert run.info.status == "FINISHED"
    again = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert (again.points, again.events) == (0, 0)


def test_the_end_of_a_curve_of_few_points_is_found_by_sync_though_others_of_its_records_go_on(
    stored_run_dir: RunDir,
) -> None:
    log = MetricsLog(stored_run_dir.metrics)
    for step in range(1, 6):
        log.append("train", step, {"loss": 1 / step} | ({"rare": 1.0} if step in (1, 3) else {}))
    run_id = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).run_id
    with closing(sqlite3.connect(stored_run_dir.path.parent / "mlflow.db")) as store, store:
        store.execute("DELETE FROM metrics WHERE key = 'train/rare' AND step = 3")
        store.execute("UPDATE latest_metrics SET step = 1 WHERE key = 'train/rare'")
    assert sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).points == 1
    assert curves_on_server(store_of(stored_run_dir), run_id) == curves_in_file(stored_run_dir)


def test_steps_trained_while_sync_reads_the_history_are_no_loss(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started(stored_run_dir).close("SCHEDULED")
    log, read = MetricsLog(stored_run_dir.metrics), MlflowClient.get_metric_history
    train(log, range(1, 6))
    sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)

    def training(client: MlflowClient, run_id: str, key: str) -> Any:
        curve = read(client, run_id, key)
        if not meanwhile:
            meanwhile.append(key)
            train(log, range(6, 11))
        return curve

    meanwhile: list[str] = []
    monkeypatch.setattr(MlflowClient, "get_metric_history", training)
    sent = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert meanwhile
    assert (sent.points, sent.events) == (0, 0)
    assert "backup" not in caplog.text


@pytest.mark.usefixtures("impatience")
def test_steps_that_are_trained_again_after_a_crash_are_no_loss_for_sync(stored_run_dir: RunDir) -> None:
    tracker, log = started(stored_run_dir), MetricsLog(stored_run_dir.metrics)
    train(log, range(2, 21, 2))
    tracker.close("SCHEDULED")
    log.rewind(10)
    train(log, range(11, 26, 2))  # at other steps than before
    tracker = started(stored_run_dir)
    tracker.close("FINISHED")
    before = curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))
    again = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert (again.points, again.events) == (0, 0)
    assert curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir)) == before


def test_points_that_the_server_refuses_do_not_count_as_sent(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_client, "valid_key", lambda key: key)
    MetricsLog(stored_run_dir.metrics).append("train", 1, {"loss": 1.0, "../bleu": 1.0, "a?": 2.0})
    assert sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).points == 1


def test_a_run_stays_in_its_experiment_and_says_so_once(
    stored_run_dir: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    started(stored_run_dir).close("SCHEDULED")
    assert "stays in experiment" not in caplog.text
    settings = settings_of(None).model_copy(update={"experiment": "other"})
    for _ in range(2):
        sync(stored_run_dir, settings, stored_run_dir.path.parent)
    words = f"MLflow run {run_id_of(stored_run_dir)} stays in experiment 'dist-transformer': MLflow cannot move a run to 'other'"
    assert caplog.text.count(words) == 1
    assert client.get_experiment_by_name("other") is None


def test_a_run_the_server_does_not_know_is_made_anew_with_its_whole_history(
    stored_run_dir: RunDir, client: MlflowClient
) -> None:
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    started(stored_run_dir, {"seed": "1"}).close("SCHEDULED")
    memory = read_json(stored_run_dir.tracking)
    lost = "0" * 32
    write_json(stored_run_dir.tracking, memory | {"run_id": lost, "run_uid": "another"})
    started(stored_run_dir).close("FINISHED")
    run = client.get_run(run_id_of(stored_run_dir))
    assert run.data.tags["dist_transformer.replaces_run"] == lost
    assert run.data.params == {"seed": "1"}
    assert curves_on_server(store_of(stored_run_dir), run.info.run_id) == curves_in_file(stored_run_dir)


def test_another_address_receives_the_whole_history(
    stored_run_dir: RunDir, empty_database: Path, tmp_path: Path
) -> None:
    other = f"sqlite:///{shutil.copy(empty_database, tmp_path / 'other.db')}"
    tracker = started(stored_run_dir)
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    tracker.close("FINISHED")
    sync(stored_run_dir, settings_of(other), stored_run_dir.path.parent)
    assert curves_on_server(other, run_id_of(stored_run_dir)) == curves_in_file(stored_run_dir)


@pytest.mark.parametrize(
    "damage", [{}, {"tags": [], "metrics": {"loss": "x"}, "status": "text", "kept": [1], "path": 5}]
)
def test_records_of_the_spool_that_are_damaged_are_left_out_and_the_others_arrive(
    stored_run_dir: RunDir, client: MlflowClient, damage: dict[str, object]
) -> None:
    for event in (
        "start",
        "checkpoint",
        "samples",
        "profile",
        "figures",
        "model",
        "evaluation",
        "status",
        "of a newer version",
    ):
        add_event(stored_run_dir.tracking_events, event, damage)
    corpus = {"name": "train", "context": "training", "digest": "00", "source": "/text"}
    start = {"tags": {"a": "b"}, "parameters": {}, "config": "", "datasets": [{"name": 5}, corpus]}
    add_event(stored_run_dir.tracking_events, "start", start)
    add_event(stored_run_dir.tracking_events, "status", {"status": "KILLED"})
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    stored_run_dir.samples.write_text('{"event": "samples", "step": 5, "sentences": "x"}\n')
    run = client.get_run(sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).run_id)
    assert (run.info.status, run.data.tags["a"]) == ("KILLED", "b")
    assert [each.dataset.name for each in run.inputs.dataset_inputs] == ["train"]
    assert curves_on_server(store_of(stored_run_dir), run.info.run_id) == curves_in_file(stored_run_dir)


def test_a_damaged_memory_ends_neither_training_nor_the_story_on_the_server(
    stored_run_dir: RunDir, client: MlflowClient
) -> None:
    tracker = started(stored_run_dir)
    log = MetricsLog(stored_run_dir.metrics)
    train(log, range(1, 6))
    tracker.close("SCHEDULED")
    first = run_id_of(stored_run_dir)
    stored_run_dir.tracking.write_text('{"run_name": "a r')
    tracker = started(stored_run_dir)
    train(log, range(6, 11))
    tracker.close("FINISHED")
    assert run_id_of(stored_run_dir) == first
    assert curves_on_server(store_of(stored_run_dir), first) == curves_in_file(stored_run_dir)
    assert client.get_run(first).info.status == "FINISHED"


def test_what_the_server_refuses_of_the_points_is_left_out_with_one_warning_each_and_the_others_go_on(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_client, "valid_key", lambda key: key)  # a rule of the server that we do not know
    tracker = started(stored_run_dir)
    log = MetricsLog(stored_run_dir.metrics)
    for step in range(1, 1001):
        log.append("train", step, {"loss": 10 / step, "../bleu": 1.0, "a?": 2.0})
    tracker.close("FINISHED")
    curves = curves_on_server(store_of(stored_run_dir), run_id_of(stored_run_dir))
    assert [(step, value) for step, value, _ in curves["train/loss"]] == [(step, 10 / step) for step in range(1, 1001)]
    assert curves.keys() == {"train/loss"}
    said = [record.message for record in caplog.records if "skipped" in record.message]
    assert len(said) == 2
    assert all(key in text for key, text in zip(("'train/../bleu'", "'train/a?'"), sorted(said), strict=True))
