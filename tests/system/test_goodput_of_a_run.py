"""Where the time of a run went that was killed and resumed: every second has a class, in every place that shows it."""

import json
import time
from pathlib import Path

import pytest
from running import kill_ranks, records, wait_for_step

from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import CLASSES, goodput_of

pytestmark = pytest.mark.slow

FAULTY = Path(__file__).parents[1] / "distributed" / "faulty_train.py"


def test_a_killed_and_resumed_run_accounts_for_all_of_its_time(command, train_small):
    settings = ("run.name=killed", "training.max_steps=60", "checkpoints.every_steps=15", "schedule.warmup_steps=4")
    run, began = command.folder / "runs" / "killed", time.time()
    process = command.start_program(FAULTY, "waits for a signal after 20", "all", "small.yaml", *settings, 1)
    wait_for_step(run, 20)
    kill_ranks(process)
    process.communicate()
    died, killed = time.time(), records(run)[-1]["step"]
    time.sleep(1.0)
    waited = time.time() - died
    train_small("killed", *settings[1:])
    ended = time.time()
    first, second = records(run, "start", "history.jsonl")
    assert second["step"] in (15, killed // 15 * 15)
    assert began - 1 <= first["began"] <= first["time"] <= second["before_seen"] + 10
    found = goodput_of(RunDir(run), time.time())
    assert found is not None
    (end,) = records(run, "end", "history.jsonl")
    assert found.total == pytest.approx(end["time"] - first["began"])
    assert found.total <= ended - began + 1
    assert sum(found.shares().values()) == pytest.approx(1)
    for name in ("steps", "start", "lost"):
        assert found.seconds[name] > 0, name
    assert found.seconds["queue"] > waited - 0.05  # the kernel counts a process's beginning in ticks of 10 ms
    shown = json.loads(command("status", run, "--json"))["goodput"]
    assert shown["seconds"] == pytest.approx(found.seconds)
    assert f"goodput: {found.shares()['steps']:.1%} of " in command("status", run)
    command("report", run, "--output", run.parent / "killed.html")
    page = (run.parent / "killed.html").read_text(encoding="utf-8")
    assert all(words in page for name, words in CLASSES.items() if found.seconds[name] > 0)
    sent = records(run, "goodput")
    assert [record["step"] for record in sent] == [15, 30, 45, 60]
    assert all(sum(record[name] for name in CLASSES) == pytest.approx(1) for record in sent)
