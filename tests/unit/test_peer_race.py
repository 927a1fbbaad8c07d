"""The race against other trainers: their lines are read for what they say, and a tiny race times two trainers from outside."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import NOT_INHERITED, without

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS_PER_MARK = 5


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the race by name; they and what they import are forgotten afterwards."""
    before = set(sys.modules)
    for folder in (BENCHMARKS, BENCHMARKS / "peers"):
        monkeypatch.syspath_prepend(str(folder))
    import environments
    import loops
    import measure
    import protocol
    import toolkits

    yield {"environments": environments, "loops": loops, "measure": measure, "protocol": protocol, "toolkits": toolkits}
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def task(race: Any, folder: Path) -> Any:
    return race["protocol"].Task(folder, None, {}, 2048, 20, STEPS_PER_MARK, 1)


@pytest.mark.parametrize(
    ("peer", "line", "step", "target_tokens", "loss"),
    [
        (
            "Marian",
            "[2026-11-22 11:08:05] Ep. 1 : Up. 5 : Sen. 432 : Cost 9.34459019 : Time 24.37s : 451.39 words/s : gNorm 3.6261",
            5,
            24.37 * 451.39,
            9.34459019,
        ),
        (
            "Eole",
            "[2026-11-22 11:20:53,390 INFO] Step 10/100000; acc: 0.8; ppl: 7604.45; xent: 8.94; aux: 0.000; mtp: 0.000; "
            "attn_ent: 0.000; lr: 2.50e-05; sents:     191; bsz: 1636/1795/38; 529/580 tok/s;     35 sec;",
            10,
            1795 * STEPS_PER_MARK,
            math.log(7604.45),
        ),
        (
            "OpenNMT-py",
            "[2026-11-22 11:35:01,770 INFO] Step 10/100000; acc: 0.7; ppl: 7588.8; xent: 8.9; lr: 0.00003; sents:     215; "
            "bsz: 1653/1987/43; 176/212 tok/s;     91 sec;",
            10,
            1987 * STEPS_PER_MARK,
            math.log(7588.8),
        ),
        ("Sockeye", 'MARK {"step": 5, "target_tokens": 8738, "loss": 8.98}', 5, 8738, 8.98),
        ("ours", '{"event": "train", "step": 10, "loss": 9.5, "nll": 9.1, "target_tokens": 99}', 10, 99, 9.5),
    ],
)
def test_a_trainers_line_says_the_step_its_real_target_tokens_and_its_loss(
    race: Any, tmp_path: Path, peer: str, line: str, step: int, target_tokens: float, loss: float
) -> None:
    peers = {peer.name: peer for peer in (*race["loops"].PEERS, *race["toolkits"].TOOLKITS)}
    mark = peers[peer].mark(line, task(race, tmp_path))
    assert mark.step == step
    assert mark.target_tokens == pytest.approx(target_tokens)
    assert mark.loss == pytest.approx(loss)
    assert peers[peer].mark("[2026-11-22 11:08:05] Training started", task(race, tmp_path)) is None


def test_a_speed_counts_neither_the_start_nor_the_warm_up(race: Any) -> None:
    mark, reading = race["protocol"].Mark, race["measure"].Reading
    readings = [reading(mark(step, 10.0 * step, 1.0), 100 + step, 50 + 2 * step) for step in (5, 10, 15, 20)]
    found = race["measure"].speed(readings, 10)
    assert found["target_tokens"] == 150 + 200
    assert found["tokens_per_second"] == 350 / 10
    assert found["tokens_per_cpu_second"] == 350 / 20
    assert found["tokens_per_step"] == 350 / 10
    assert found["start_cpu_seconds"] == 50


def test_a_trainer_that_fails_is_no_result_and_its_last_words_are_kept(race: Any, tmp_path: Path) -> None:
    protocol, measure = race["protocol"], race["measure"]
    broken = protocol.Peer(
        "broken", (), (), lambda task, python: [str(python), "-c", "raise SystemExit('no such thing')"],
        protocol.printed_mark, "",
    )  # fmt: skip
    with pytest.raises(measure.Failed, match="no such thing"):
        measure.run(broken, Path(sys.executable), task(race, tmp_path / "run"))


def test_a_trainer_that_is_not_there_is_named_with_what_it_lacks(race: Any, tmp_path: Path) -> None:
    absent = replace(race["loops"].PEERS[1], modules=("no_such_module",))
    with pytest.raises(race["environments"].NotInstalled, match="no_such_module: not in this environment"):
        race["environments"].python_of(absent, tmp_path)


@pytest.mark.slow
def test_a_tiny_race_times_ours_and_a_plain_loop_on_the_same_text(tmp_path: Path) -> None:
    raw = tmp_path / "race.json"
    sizes = ["--model", "tiny", "--vocabulary", "400", "--pairs", "800", "--tokens", "200", "--steps", "15"]
    command = [sys.executable, str(BENCHMARKS / "peers" / "race.py"), "--work", str(tmp_path), *sizes]
    command += ["--peers", "torch.nn.Transformer loop", "--rounds", "1", "--loss-steps", "0", "--json", str(raw)]
    environment = {**without(NOT_INHERITED), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| --- |") == 1
    figures = json.loads(raw.read_text(encoding="utf-8"))["figures"]
    assert figures["problems"] == {}
    for name in ("ours", "torch.nn.Transformer loop"):
        (sample,) = figures["speeds"][name]
        assert sample["steps"] == 10
        assert sample["target_tokens"] == pytest.approx(10 * 200, rel=0.15)
        assert sample["tokens_per_cpu_second"] > 0
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running
