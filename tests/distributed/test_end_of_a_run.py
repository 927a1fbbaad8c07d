"""Ranks that wait for MLflow, or for the lock, longer than training.hang_seconds: nobody is hung, whatever the wait is for."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Command, records, with_constants

from dist_transformer.config.loading import load_config
from dist_transformer.errors import EXIT_REQUEUE
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.engine.schedule import learning_rate

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("faulty_train.py")
HANG_SECONDS = 12
LONG = {"tracking.tracker.CLOSE_SECONDS": 15}
SOON = {"training.divergence.WINDOW_STEPS": 3, "training.divergence.PATIENCE_STEPS": 4}


@pytest.fixture
def waiting() -> Iterator[tuple[str, ...]]:
    """Settings of a run whose MLflow takes connections and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        yield (
            "tracking.enabled=true",
            f"tracking.uri=http://127.0.0.1:{silent.getsockname()[1]}",
            f"training.hang_seconds={HANG_SECONDS}",
        )


def test_a_finished_run_has_finished_on_every_rank(command: Command, waiting: tuple[str, ...]) -> None:
    run = command.folder / "runs" / "waiting"
    said = command("train", "small.yaml", "run.name=waiting", *waiting, "--ranks", 2, **with_constants(LONG))
    assert "MLflow did not take everything" in said
    assert "finished at step 6" in said
    assert (run / "report.html").is_file()


@pytest.mark.parametrize("work", ["averaging", "report"])
def test_a_stop_is_heard_after_the_last_step_and_the_next_start_does_the_rest(command: Command, work: str) -> None:
    name = f"stopped-{work}"
    run, settings = command.folder / "runs" / name, (f"run.name={name}", "tracking.enabled=true")
    code, said = command.program(PROGRAM, f"end {work}", "0", "small.yaml", *settings, "2")
    assert code == EXIT_REQUEUE, said
    assert read_json(run / "run.json")["state"] == "stopped"
    assert (run / "model").exists() == (work == "report")
    before = (run / "metrics.jsonl").read_bytes()
    command("train", "small.yaml", *settings, "--ranks", 2)
    assert read_json(run / "run.json")["state"] == "finished"
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "report.html").is_file()
    assert (run / "metrics.jsonl").read_bytes() == before


def test_the_lock_of_a_dead_holder_elsewhere_is_waited_for(command: Command) -> None:
    run = RunDir(command.folder / "runs" / "locked")
    run.path.mkdir(parents=True)
    holder = {
        "host": "far",
        "boot": "another machine",
        "pid": 7,
        "job": None,
        "attempt": 0,
        "token": "x",
        "started": 1.0,
    }
    write_json(run.owner, holder)
    later = time.time() + 3600
    os.utime(run.owner, (later, later))
    slowly = with_constants({"run.lock.BEAT_SECONDS": HANG_SECONDS / 5})
    settings = ("run.name=locked", f"training.hang_seconds={HANG_SECONDS}")
    assert "finished at step 6" in command("train", "small.yaml", *settings, "--ranks", 2, **slowly)


def test_a_run_that_diverged_goes_on(command: Command, waiting: tuple[str, ...]) -> None:
    settings = (
        "run.name=waiting_diverged", "training.max_steps=12", "checkpoints.every_steps=2", "checkpoints.keep_last=20",
        "divergence.policy=lower_learning_rate",
    )  # fmt: skip
    arguments = ("spike", "1", "small.yaml", *settings, *waiting, "2")
    code, said = command.program(PROGRAM, *arguments, **with_constants(LONG | SOON))
    run = command.folder / "runs" / "waiting_diverged"
    assert code == 0, said
    assert said.count("MLflow did not take everything") == 2
    (event,) = read_json(run / "divergence.json")
    assert (event["since_step"], event["went_on_from"]) == (6, 4)
    assert len([*(run / "checkpoints").glob("*.diverged")]) == 1
    config = load_config(run / "config.yaml", check_files=False)
    expected = [learning_rate(config, step) * (1.0 if step <= 4 else 0.5) for step in range(1, 13)]
    assert [record["learning_rate"] for record in records(run)] == pytest.approx(expected)
    assert [record["step"] for record in records(run)] == list(range(1, 13))
