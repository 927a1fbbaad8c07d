"""The acceptance of a GPU, on a CPU: a kill and a resume are really tried, and a part that fails does not end the others."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from running import NOT_INHERITED


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in NOT_INHERITED:
        monkeypatch.delenv(name, raising=False)
    import acceptance

    for name, steps in (("STEPS", 12), ("FIRST_KILL", 4), ("SECOND_KILL", 8)):
        monkeypatch.setattr(acceptance, name, steps)
    return acceptance


@pytest.mark.slow
def test_a_run_that_is_killed_twice_has_the_losses_of_one_without_a_stop(acceptance: Any, tmp_path: Path) -> None:
    text = acceptance._resume(tmp_path, 600, "fp32")
    assert re.match(r"Killed after steps 4 and 8, resumed from steps \d+ and \d+, .*: losses within ", text)
    assert (tmp_path / "killed" / "history.jsonl").read_text(encoding="utf-8").count('"event": "start"') == 3


@pytest.mark.slow
def test_a_part_that_fails_is_written_down_and_the_others_go_on(
    acceptance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def lost(folder: Path, seconds: float, precision: str) -> str:
        return acceptance.run([sys.executable, "-c", f"exit('{precision} is lost')"], folder, 60)

    def late(folder: Path, seconds: float) -> str:
        return acceptance.run([sys.executable, "-c", "import time; time.sleep(60)"], folder, 0.2)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kernels = acceptance._kernels
    monkeypatch.setattr(acceptance, "_kernels", lambda folder, seconds: kernels(folder, 600))  # a CPU may be busy
    monkeypatch.setattr(acceptance, "_matrix", lambda folder, seconds: "| a table |")
    monkeypatch.setattr(acceptance, "_resume", lost)
    monkeypatch.setattr(acceptance, "_preflight", late)
    throughput = acceptance.Part("Throughput", 1, lambda folder, seconds: "| fast |")
    assert not acceptance.accept(tmp_path, ["bf16"], throughput, written.append, time.monotonic() + 600)
    headings = [line.rsplit(",", 1)[0] for line in written[-1].splitlines() if line.startswith("## ")]
    assert headings == [
        "## Kernels: passed",
        "## Stages, precisions and options: passed",
        "## Save, kill, resume in bf16: failed",
        "## Preflight and plan: failed",
        "## Throughput: passed",
    ]
    assert "bf16 is lost" in written[-1]
    assert "| fast |" in written[-1]
