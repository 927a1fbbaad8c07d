"""status --watch: the facts of runs again and again, in a terminal and without one, until all have ended or Ctrl-C."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_slurm import FakeSlurm, job_line
from running import NOT_INHERITED, PROGRAM, without
from typer.testing import CliRunner
from watched_run import NOW, add_lines, beat, make_run, trained

from dist_transformer.cli import watch as watch_module
from dist_transformer.cli.main import app
from dist_transformer.cli.watch import BARS, sparkline
from dist_transformer.cluster.job_status import short_reports
from dist_transformer.errors import UserError
from dist_transformer.reporting.curves import Curve
from dist_transformer.run import status as status_module

SCORES = {"event": "validation", "step": 50, "time": NOW, "loss": 3.25, "perplexity": 12.5, "bleu": 21.5}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs: one that has ended, one whose job waits."""
    finished = make_run(tmp_path / "runs" / "a", state="finished")
    add_lines(finished.metrics, trained(10, NOW - 9, loss=9.0), trained(20, NOW - 5, loss=2.0), SCORES)
    make_run(tmp_path / "runs" / "b", state="stopped", job_id="5")
    return tmp_path / "runs"


def after_each_look(monkeypatch: pytest.MonkeyPatch, *then: Callable[[], object]) -> None:
    """In place of waiting, the next of these is called; there must be no more looks than they allow."""
    left = iter(then)
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: next(left)())


def lines(*arguments: object) -> list[str]:
    result = CliRunner().invoke(app, ["status", *map(str, arguments), "--watch"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_without_a_terminal_there_is_a_line_for_each_run_until_all_have_ended(
    slurm: FakeSlurm, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "Priority"))
    after_each_look(
        monkeypatch,
        lambda: slurm.answers("squeue", job_line("5", "RUNNING")),
        lambda: slurm.answers("squeue", job_line("5", "COMPLETED")),
    )
    shown = lines(runs)
    assert [line.split(":")[0] for line in shown] == ["a", "b"] * 3
    assert shown[0].startswith("a: finished  step 40 of 1000  starts 2  loss █▁ 2.0000  900 tokens/s")
    assert shown[0].endswith("validation at step 50: loss 3.2500, perplexity 12.50, BLEU 21.50")
    states = [line.rpartition("job 5 ")[2] for line in shown[1::2]]
    assert states == ["PENDING", "RUNNING", "COMPLETED"]


def test_a_slurm_that_does_not_answer_ends_no_watch(
    slurm: FakeSlurm, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answers("squeue", code=1, stderr="Unable to contact slurm controller")
    after_each_look(
        monkeypatch,
        lambda: slurm.answers("squeue", job_line("5", "PENDING")),
        lambda: slurm.answers("squeue", job_line("5", "COMPLETED")),
    )
    shown = [line for line in lines(runs) if line.startswith("b: ")]
    assert "Slurm was not asked" in shown[0]
    assert "Unable to contact" in shown[0]
    assert [line.rpartition("job 5 ")[2] for line in shown[1:]] == ["PENDING", "COMPLETED"]


def test_a_run_is_watched_while_its_heart_beats(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "SILENT_SECONDS", 20_000.0)
    run_dir = make_run(tmp_path / "c")
    begun, much_later = time.time(), time.time() + 10_000
    add_lines(run_dir.metrics, trained(100, begun - 10), trained(200, begun))
    beat(run_dir, much_later)
    after_each_look(monkeypatch, lambda: add_lines(run_dir.metrics, trained(300, begun + 10)), lambda: beat(run_dir, 0))
    shown = lines(run_dir.path)
    assert ["step 200 of 1000" in shown[0], "step 300 of 1000" in shown[1], len(shown)] == [True, True, 3]
    assert "1 min 20 s left" in shown[0]
    assert "1 min 10 s left" in shown[1]
    assert "left" not in shown[2]


def test_a_look_reads_what_was_added_since_the_last_one_and_all_of_a_file_that_was_cut_or_replaced(runs: Path) -> None:
    (document,) = short_reports([runs / "a"])
    metrics, lines = runs / "a" / "metrics.jsonl", (runs / "a" / "metrics.jsonl").read_bytes().splitlines(keepends=True)

    def shown() -> list[str]:
        loss, scores = [*watch_module._facts(document)][1:]
        return [loss.split()[1], *scores.split()[3:6]]

    assert shown() == ["█▁", "50:", "loss", "3.2500,"]
    metrics.write_bytes(b"".join(b"?" * (len(line) - 1) + b"\n" for line in lines))  # not read again
    add_lines(metrics, trained(60, NOW, loss=2.0))
    with metrics.open("a") as file:
        file.write('{"event": "train", "step": 70, "time": 1.5, ')
    assert shown() == ["█▁▁", "50:", "loss", "3.2500,"]
    with metrics.open("a") as file:
        file.write('"loss": 9.0}\n')
    add_lines(metrics, {**SCORES, "step": 80, "loss": 1.5})
    assert shown() == shown() == ["█▁▁█", "80:", "loss", "1.5000,"]
    metrics.write_bytes(b"".join(lines))
    assert shown() == ["█▁", "50:", "loss", "3.2500,"]
    other = metrics.with_name("other")
    other.write_bytes(b"".join(lines).replace(b"9.0", b"1.0"))
    other.replace(metrics)
    add_lines(metrics, trained(15, NOW, loss=1.0))  # shown by step
    assert shown() == ["▁▁█", "50:", "loss", "3.2500,"]


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in it"):
        lines(tmp_path)
    with pytest.raises(UserError, match="exclude each other"):
        lines(tmp_path, "--json")


@pytest.mark.parametrize(
    ("values", "bars"),
    [([1, 2], "▁█"), ([3, 3], "▁▁"), ([0, 7, 3.4], "▁█▄"), ([np.nan, 1, np.inf, 2], "▁█"), ([np.nan], "")],
)
def test_a_curve_is_a_row_of_bars(values: list[float], bars: str) -> None:
    assert sparkline(Curve(np.arange(len(values), dtype=float), np.asarray(values, dtype=float))) == bars


def test_a_long_curve_is_thinned_and_none_is_empty() -> None:
    steps = np.arange(10_000.0)
    bars = sparkline(Curve(steps, -steps))
    assert len(bars) <= watch_module.CURVE_POINTS
    assert [BARS.index(bar) for bar in bars] == sorted((BARS.index(bar) for bar in bars), reverse=True)
    assert sparkline(None) == ""


@pytest.mark.slow
def test_on_a_terminal_the_runs_are_drawn_anew_until_ctrl_c(runs: Path) -> None:
    run_dir = make_run(runs / "c")
    beat(run_dir, time.time() + 10_000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "status", str(runs), "--watch"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**without(NOT_INHERITED), "TERM": "xterm", "COLUMNS": "120"},
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # so that Ctrl-C reaches it
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    then = [("c: running", lambda: add_lines(run_dir.metrics, trained(77, time.time(), loss=1.5))),
            ("1.5000  900 tokens/s", lambda: os.write(ours, b"\x03"))]  # fmt: skip
    try:
        while select.select([ours], [], [], 120)[0] and (part := os.read(ours, 65536)):
            shown += part.decode(errors="replace")
            if then and then[0][0] in shown:
                then.pop(0)[1]()
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(ours)
    assert process.wait(240) == 0, shown
    assert then == []
    assert "\x1b[1A" in shown  # drawn over, not below
