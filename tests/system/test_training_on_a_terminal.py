"""What `train` prints: lines in a file or a pipe, a progress bar on a terminal, nothing with --quiet, records with --json."""

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from running import NOT_INHERITED, Command, without

pytestmark = pytest.mark.slow

RUN = (
    "small.yaml", "validation.every_steps=3", "validation.translate=false", "training.max_steps=4",
)  # fmt: skip
FINISHED = "end        finished at step 4"
SAMPLED = {"system"}  # of the machine, at most every few seconds of training: a quick run has none


def test_with_json_each_record_is_printed_once_as_it_is_in_the_file(command: Command) -> None:
    out, err = command.streams("train", *RUN, "run.name=json", "--json", "--ranks", "2")
    file = command.folder / "runs" / "json" / "metrics.jsonl"
    assert out == file.read_text(encoding="utf-8")
    assert {json.loads(line)["event"] for line in out.splitlines()} - SAMPLED == {"train", "validation", "goodput"}
    assert "step       3  validation" in err


def test_a_quiet_run_says_nothing_and_writes_its_log(command: Command) -> None:
    out, err = command.streams("train", *RUN, "run.name=quiet", "--quiet", "--ranks", "2")
    assert out == ""
    assert "step" not in err
    assert FINISHED in (command.folder / "runs" / "quiet" / "train.log").read_text()


def test_a_reader_that_has_gone_does_not_end_the_training(command: Command) -> None:
    process = command.start("train", *RUN, "run.name=gone", "--json")
    assert process.stdout is not None
    process.stdout.close()
    process.wait(300)
    assert process.returncode == 0
    lines = (command.folder / "runs" / "gone" / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if json.loads(line)["event"] not in SAMPLED]) == 8


def on_terminal(folder: Path, client: Path, *arguments: str) -> str:
    """What appears on a terminal of 160 columns."""
    ours, theirs = pty.openpty()
    environment = {**without(NOT_INHERITED), "COLUMNS": "160", "TERM": "xterm"}
    process = subprocess.Popen([client, "train", *arguments], cwd=folder, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(ours)
    assert process.wait(240) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_how_far_the_run_is_how_fast_and_when_it_saves(command: Command, quick_client: Path) -> None:
    shown = on_terminal(command.folder, quick_client, *RUN, "run.name=bar")
    assert "4/4" in shown
    # The bar is drawn some times a second, so that a step may be over before it was seen.
    for text in ("tokens/s", "loss ", "(step 3)", "save in ", "finished at step"):
        assert text in shown, f"{text!r} is not shown"


def test_a_quiet_terminal_shows_no_bar(command: Command, quick_client: Path) -> None:
    assert "save in" not in on_terminal(command.folder, quick_client, *RUN, "run.name=quiet_bar", "--quiet")
    assert FINISHED in (command.folder / "runs" / "quiet_bar" / "train.log").read_text()
