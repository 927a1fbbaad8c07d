"""Which address is used, and what of it is kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import Command
from tracking_helpers import curves_in_file, curves_on_server, run_id_of, settings_of, tracker_of, train

from dist_transformer.errors import UserError
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.tracking.tracker import store_uri, target_of

VARIABLE = "MLFLOW_TRACKING_URI"


def test_the_setting_goes_before_mlflows_variable_and_that_before_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "a")
    assert target_of(settings_of(None), run_dir, tmp_path).uri == store_uri(tmp_path)
    monkeypatch.setenv(VARIABLE, "http://of-the-shell:5000")
    assert target_of(settings_of(None), run_dir, tmp_path).uri == "http://of-the-shell:5000"
    assert target_of(settings_of("http://of-the-file:5000"), run_dir, tmp_path).uri == "http://of-the-file:5000"


@pytest.mark.parametrize("value", ["", " ", "mlruns", "node5:5000", "user:pa55word@node5", "sqlite:///mlflow.db"])
def test_a_variable_that_holds_no_address_is_refused_and_no_store_is_taken_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UserError, match=f"unset {VARIABLE}") as raised:
        target_of(settings_of(None), RunDir(tmp_path / "a"), tmp_path)
    assert "pa55word" not in str(raised.value)
    assert target_of(settings_of("http://of-the-file:5000"), RunDir(tmp_path / "a"), tmp_path).uri


@pytest.mark.slow
def test_a_user_without_a_home_as_in_a_container_is_tracked_too() -> None:
    program = "import pwd; pwd.getpwuid = {}.__getitem__; from dist_transformer.tracking import mlflow_client"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "config check", "track sync"])
def test_who_has_an_empty_variable_is_told_before_anything_is_done(command: Command, verb: str) -> None:
    arguments: list[object] = ["small.yaml", "run.name=x"]
    if verb == "track sync":
        target = command.folder / "runs" / "of-an-empty-variable"
        target.mkdir(parents=True)
        (target / "config.yaml").write_text((command.folder / "small.yaml").read_text(encoding="utf-8"))
        arguments = [target]
    out = command(*verb.split(), *arguments, "tracking.enabled=true", code=2, MLFLOW_TRACKING_URI="")
    assert "file that is not there" in out
    assert not (command.folder / "runs" / "x").exists()
    assert "file that is not there" not in command(
        "config", "check", "small.yaml", "tracking.uri=http://h:1", MLFLOW_TRACKING_URI=""
    )


@pytest.mark.slow
def test_a_run_is_tracked_where_mlflows_variable_says(
    stored_run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{stored_run_dir.path.parent}/elsewhere.db"
    stored_run_dir.path.parent.joinpath("mlflow.db").rename(stored_run_dir.path.parent / "elsewhere.db")
    monkeypatch.setenv(VARIABLE, elsewhere)
    tracker = tracker_of(stored_run_dir, None)
    tracker.start({}, {}, "")
    train(MetricsLog(stored_run_dir.metrics), range(1, 4))
    tracker.close("FINISHED")
    assert curves_on_server(elsewhere, run_id_of(stored_run_dir)) == curves_in_file(stored_run_dir)
    assert not (stored_run_dir.path.parent / "mlflow.db").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "address",
    [
        "http://someone:pa55word@127.0.0.1:9",
        "http://someone:pa/55word@127.0.0.1:9",
        "sqlite:////nowhere/mlflow.db?password=pa55word",
    ],
)
def test_credentials_in_mlflows_variable_are_in_no_file_of_the_run_and_in_no_line_of_the_log(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    tracker = tracker_of(run_dir, None, close_seconds=1)
    tracker.start({"a": "b"}, {}, "tracking: {uri: null}\n")
    tracker.close("FINISHED")
    assert "55word" not in caplog.text
    files = [path for path in run_dir.path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert b"55word" not in path.read_bytes(), path


@pytest.mark.slow
def test_what_is_remembered_of_the_address_is_without_credentials(
    stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_uri(stored_run_dir.path.parent)
    monkeypatch.setenv(VARIABLE, f"{store}?password=pa55word")
    tracker = tracker_of(stored_run_dir, None)
    tracker.start({}, {}, "")
    tracker.close("FINISHED")
    assert read_json(stored_run_dir.tracking)["uri"] == f"{store}?password=***"
