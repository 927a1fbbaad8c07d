"""The status that MLflow shows of a run that was killed: mended by `status`, true again when the run goes on."""

import json
import os
import signal
import time
from pathlib import Path

import filelock
import pytest
from mlflow import MlflowClient
from running import Command, wait_for_step, with_constants

from dist_transformer import evaluate
from dist_transformer.config.loading import load_config
from dist_transformer.files import read_json
from dist_transformer.run.attempts import newest_checkpoint
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event
from dist_transformer.run.status import SILENT_SECONDS
from dist_transformer.tracking.final_status import settle, status_said

pytestmark = pytest.mark.slow

RUN = ("train", "small.yaml", "run.name=killed-in-mlflow", "tracking.enabled=true", "checkpoints.every_steps=5",
       "checkpoints.keep_last=2", "validation.every_steps=1000000")  # fmt: skip
PATIENT = with_constants(dict.fromkeys(["cli.status.CORRECTION_SECONDS", "decoding.evaluation.TELL_SECONDS"], 240))


@pytest.fixture(scope="module")
def killed(command: Command) -> RunDir:
    """A run that was killed after its MLflow run was made; its last sign of life is long ago."""
    run_dir = RunDir(command.folder / "runs" / "killed-in-mlflow")
    process = command.start(*RUN, "training.max_steps=100000")
    wait_for_step(run_dir.path, 10)
    deadline = time.monotonic() + 240
    while not (
        run_dir.tracking.is_file() and read_json(run_dir.tracking)["spool_offset"] and newest_checkpoint(run_dir)
    ):
        assert time.monotonic() < deadline, "the run did not reach MLflow, or saved nothing"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    silent = time.time() - 2 * SILENT_SECONDS
    os.utime(run_dir.owner, (silent, silent))
    return run_dir


@pytest.fixture(scope="module")
def ended(command: Command, killed: RunDir) -> RunDir:
    """The same run, which went on and has finished."""
    patient = with_constants({"tracking.tracker.CLOSE_SECONDS": 240})
    command(*RUN, f"training.max_steps={_checkpoint_step(killed) + 10}", **patient)
    return killed


def status_on_server(run_dir: RunDir) -> str:
    memory = read_json(run_dir.tracking)
    return str(MlflowClient(tracking_uri=memory["uri"]).get_run(memory["run_id"]).info.status)


def test_who_asks_for_the_status_of_a_killed_run_mends_it_in_mlflow(command: Command, killed: RunDir) -> None:
    assert status_on_server(killed) == "RUNNING"
    said = command("status", killed.path, **PATIENT)
    assert "MLflow had RUNNING as the status of this run; it is KILLED now\n" in said
    assert status_on_server(killed) == "KILLED"
    assert "MLflow" not in command("status", killed.path)


def test_when_it_goes_on_it_is_the_same_run_and_ends_as_it_says(
    command: Command, killed: RunDir, request: pytest.FixtureRequest
) -> None:
    run_id, step = read_json(killed.tracking)["run_id"], _checkpoint_step(killed)
    ended: RunDir = request.getfixturevalue("ended")  # from here on
    assert read_json(ended.tracking)["run_id"] == run_id
    assert status_on_server(ended) == "FINISHED"
    starts = [record for record in _history(ended) if record["event"] == "start"]
    assert [start["step"] for start in starts] == [0, step]
    assert _history(ended)[-1]["state"] == "finished"


def _checkpoint_step(run_dir: RunDir) -> int:
    return int(str(newest_checkpoint(run_dir)).removeprefix("step_"))  # run.json may not know it yet


def _history(run_dir: RunDir) -> list[dict[str, object]]:
    return [json.loads(line) for line in run_dir.history.read_text(encoding="utf-8").splitlines()]


def test_a_server_that_is_away_is_told_later(command: Command, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "a")
    (run_dir.path).mkdir(parents=True)
    config = (command.folder / "small.yaml").read_text(encoding="utf-8")
    run_dir.config.write_text(config.replace("enabled: false", "uri: 'http://127.0.0.1:9'"), encoding="utf-8")
    add_event(run_dir.tracking_events, "start", {"tags": {}, "parameters": {}, "config": ""})
    MetricsLog(run_dir.metrics).close()
    assert status_said(run_dir) == "RUNNING"
    settings = load_config(run_dir.config, check_files=False).tracking
    assert "no answer; later: dist-transformer track sync" in str(settle(run_dir, "KILLED", settings, tmp_path, 1))
    assert status_said(run_dir) == "KILLED"
    said = "MLflow did not have KILLED as the status of this run; KILLED was not sent: no answer"
    assert f"{said}; later: dist-transformer track sync {run_dir.path}\n" in command("status", run_dir.path)


def test_who_has_another_address_does_not_move_the_run_there(command: Command, ended: RunDir, tmp_path: Path) -> None:
    memory = read_json(ended.tracking)
    add_event(ended.tracking_events, "start", {"tags": {}, "parameters": {}, "config": ""})
    out = command("status", ended.path, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/other.db")
    assert f"FINISHED was not sent: the run is followed at {memory['uri']}" in out
    assert read_json(ended.tracking) == memory
    assert not (tmp_path / "other.db").exists()


def test_nothing_is_said_of_a_run_that_somebody_trains(command: Command, ended: RunDir) -> None:
    add_event(ended.tracking_events, "start", {"tags": {}, "parameters": {}, "config": ""})
    with filelock.FileLock(ended.lock):
        assert "MLflow" not in command("status", ended.path)
    assert "it is FINISHED now" in command("status", ended.path, **PATIENT), "it had finished before"


def test_scores_of_an_evaluation_are_found_with_the_run(
    command: Command, ended: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("evaluate", ended.path, "--beam", 1, **PATIENT)
    memory, scores = read_json(ended.tracking), read_json(ended.evaluation / "test.json")
    run = MlflowClient(tracking_uri=memory["uri"]).get_run(memory["run_id"])
    measures = ("bleu", "chrf", "exact_match")
    assert {key: run.data.metrics[f"evaluation/test/{key}"] for key in measures} == {
        key: scores[key] for key in measures
    }
    assert run.info.status == "FINISHED"
    with filelock.FileLock(ended.lock):
        said = command("evaluate", ended.path, "--beam", 1)
    assert (
        "not reported to MLflow: the run is being trained, or its lock cannot be taken; evaluate again when it has ended"
        in said
    )
    monkeypatch.setattr("dist_transformer.decoding.evaluation.TELL_SECONDS", 240)
    again = evaluate(ended.path, beam_size=2)  # from Python
    history = MlflowClient(tracking_uri=memory["uri"]).get_metric_history(memory["run_id"], "evaluation/test/bleu")
    assert [point.value for point in history] == [scores["bleu"], again["bleu"]]
