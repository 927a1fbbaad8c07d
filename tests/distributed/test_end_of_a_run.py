"""Ranks that wait for MLflow longer than training.hang_seconds: nobody is hung, whatever the wait is for."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import NOT_INHERITED, Command, records, with_constants, without

from dist_transformer.errors import EXIT_REQUEUE
from dist_transformer.files import read_json

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
    done = subprocess.run(
        [sys.executable, str(PROGRAM), f"end {work}", "0", "small.yaml", *settings, "2"],
        cwd=command.folder, env=without(NOT_INHERITED), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_REQUEUE, done.stdout + done.stderr
    assert read_json(run / "run.json")["state"] == "stopped"
    assert (run / "model").exists() == (work == "report")
    before = (run / "metrics.jsonl").read_bytes()
    command("train", "small.yaml", *settings, "--ranks", 2)
    assert read_json(run / "run.json")["state"] == "finished"
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "report.html").is_file()
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_diverged_goes_on(command: Command, waiting: tuple[str, ...]) -> None:
    settings = (
        "run.name=waiting_diverged", "training.max_steps=12", "checkpoints.every_steps=2", "checkpoints.keep_last=20",
        "divergence.policy=lower_learning_rate",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "spike", "1", "small.yaml", *settings, *waiting, "2"],
        cwd=command.folder, env={**without(NOT_INHERITED), **with_constants(LONG | SOON)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    said, run = done.stdout + done.stderr, command.folder / "runs" / "waiting_diverged"
    assert done.returncode == 0, said
    assert said.count("MLflow did not take everything") == 2
    assert len(read_json(run / "divergence.json")) == 1
    assert [record["step"] for record in records(run)] == list(range(1, 13))
