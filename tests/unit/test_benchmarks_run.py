"""The benchmarks still run, and their raw figures are what their tables say. Sizes are tiny: no figure means anything."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, raw: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What the benchmark printed, and its raw figures."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--rounds", "1", "--json", str(raw)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=raw.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(raw.read_text(encoding="utf-8"))["figures"]


@pytest.mark.slow
def test_the_loader_benchmark_loads_every_pair_and_compares_windows_speed_and_resume(tmp_path: Path) -> None:
    sizes = ["--pairs", "2000", "--lanes", "2", "--max-tokens", "1024", "--row-group-rows", "256"]
    windows = ["--windows", "200", "1000", "--window-rows", "500", "--streamed-rows", "200"]
    printed, figures = run("loader.py", tmp_path / "loader.json", *sizes, *windows)
    assert printed.count("| --- |") == 3
    small, large = figures["batching"]["200"], figures["batching"]["1000"]
    assert 0 < large["padding"] < small["padding"] < 1
    assert small["straggler"] >= 1
    for loading in ("in the training process", "1 worker"):
        assert figures["throughput"][loading][0]["pairs"] == pytest.approx(2000, rel=0.05)  # but for two first steps
        assert figures["resume"][loading][0]["wall_seconds"] > 0
    assert figures["throughput"]["datasets, streaming, row by row"][0]["pairs"] == 200


@pytest.mark.slow
def test_the_step_benchmark_compares_networks_of_one_size(tmp_path: Path) -> None:
    sizes = ["--preset", "tiny", "--vocabulary", "200", "--max-tokens", "256", "--steps", "1"]
    printed, figures = run("step.py", tmp_path / "step.json", *sizes)
    assert printed.count("| --- |") == 1
    assert len(set(figures["parameters"].values())) == 1
    plain = ["torch.nn.Transformer", "torch.nn.Transformer, our dropout"]
    stages = [*plain, "ours, ZeRO 0", "ours, ZeRO 1", "ours, ZeRO 2"]
    assert sorted(figures["steps"]) == sorted(f"{name}, {p}" for name in stages for p in ("fp32", "bf16"))
    for (sample,) in figures["steps"].values():
        phases = sum(sample[phase] for phase in ("forward", "backward", "update"))
        assert 0 < phases <= sample["cpu_seconds"]
