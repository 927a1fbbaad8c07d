"""Real runs, MLflow's page on them, and a real Chromium to look at them with."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import SCREENSHOTS
from running import NOT_INHERITED, Command, free_port, with_constants, without

CHROMIUM = shutil.which("chromium")
REQUIRED = "DIST_TRANSFORMER_REQUIRE_SERVICES"
"""With this variable set to 1 a browser that is not installed is a failure; without it the tests are skipped."""

CONFIG = """
run: {name: first}
data:
  train: {demo: train}
  validation: {demo: validation}
  test: {demo: test}
  filters: {max_tokens: 64}
  lanes: 2
  max_tokens: 1024
  window_rows: 1000
  loader_workers: 0
tokenizer: {vocabulary_size: 500}
model: {preset: tiny, d_model: 48, d_ff: 96, num_encoder_layers: 1, num_decoder_layers: 1, dropout: 0.0}
optimizer: {learning_rate: 0.01}
schedule: {warmup_steps: 20}
training: {max_steps: 120, precision: fp32, log_every_steps: 4}
validation: {every_steps: 30, max_sentences: 30}
checkpoints: {every_steps: 30, keep_last: 2, keep_best: 1, average_last: 2}
"""
STOPPED_AFTER = 40  # steps
LONGER = (
    "training.max_steps=600",
    "training.log_every_steps=10",
    "validation.every_steps=120",
    "checkpoints.every_steps=120",
)
"""For pictures: the model has learned something by then."""
PATIENT = with_constants({"tracking.tracker.CLOSE_SECONDS": 240})
"""MLflow has all of a run at its end."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium. Only of this module: while playwright runs, no other event loop can."""
    if CHROMIUM is None:
        reason = "no Chromium here: apt-get install chromium"
        pytest.fail(reason) if os.environ.get(REQUIRED) == "1" else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def runs(browser: Any, tmp_path_factory: pytest.TempPathFactory, quick_client: Path) -> Path:
    """A folder with the runs `first`, which was stopped and went on, and `second`, with another learning rate."""
    command = Command(tmp_path_factory.mktemp("browser"), quick_client)
    (command.folder / "config.yaml").write_text(CONFIG)
    longer = LONGER if SCREENSHOTS in os.environ else ()
    first = command.start("train", "config.yaml", *longer)
    metrics = command.folder / "runs" / "first" / "metrics.jsonl"
    while first.poll() is None and not (metrics.exists() and f'"step": {STOPPED_AFTER},' in metrics.read_text()):
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    out, err = first.communicate(timeout=300)
    assert first.returncode == 75, out + err
    command("train", "config.yaml", *longer, **PATIENT)
    command("train", "config.yaml", *longer, "run.name=second", "optimizer.learning_rate=0.002", **PATIENT)
    return command.folder / "runs"


@pytest.fixture(scope="module")
def mlflow_address(runs: Path) -> Iterator[str]:
    """Where `dist-transformer ui` shows the runs."""
    port = free_port()
    log = runs.parent / "ui.log"
    with log.open("w") as written:
        command = [sys.executable, "-m", "dist_transformer", "ui", str(runs), "--port", str(port)]
        server = subprocess.Popen(
            command, env=without(NOT_INHERITED), stdout=written, stderr=written, start_new_session=True
        )
    try:
        wait_for_port(port, server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=240)


def wait_for_port(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    raise AssertionError(f"no server on port {port}\n{log.read_text()}")
