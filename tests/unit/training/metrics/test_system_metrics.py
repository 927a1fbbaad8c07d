"""The sampler of a node, on this machine."""

import subprocess
import sys
import threading
import time
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from checkpoint_helpers import ThreadRanks, on_ranks

from dist_transformer.distributed.group import Ranks
from dist_transformer.training.metrics import system_metrics
from dist_transformer.training.metrics.logger import MetricsLogger
from dist_transformer.training.metrics.system_metrics import NodeSampler

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def frequent_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_SECONDS", 0.05)


def first_means(sampler: NodeSampler, is_wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (means := sampler.means()) and is_wanted(means):
            return means
    raise AssertionError("no such sample came")


def test_a_node_says_how_busy_it_is_under_its_name(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    with NodeSampler(ranks) as sampler:
        means = first_means(sampler, bool)
    assert means.keys() == {
        f"n1/{key}" for key in ("cpu_percent", "memory_gb", "sent_mb_per_second", "received_mb_per_second")
    }
    assert 0 <= means["n1/cpu_percent"] <= 100
    assert 0 < means["n1/memory_gb"] <= psutil.virtual_memory().total / 1e9


def test_the_first_sample_comes_soon(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_SECONDS", 3600.0)
    with NodeSampler(ranks) as sampler:
        assert first_means(sampler, bool)


def test_work_shows_in_the_use_of_the_processors(ranks: Ranks) -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            pass

    with NodeSampler(ranks) as sampler:
        threading.Thread(target=work, daemon=True).start()
        one_core = 100 / psutil.cpu_count()
        try:
            means = first_means(sampler, lambda means: next(iter(means.values())) > one_core / 2)
        finally:
            is_over.set()
    assert means


def test_what_was_asked_for_once_is_not_counted_again(ranks: Ranks) -> None:
    with NodeSampler(ranks) as sampler:
        first_means(sampler, bool)
    sampler.means()
    sampler._thread.join(10)
    sampler.means()
    assert sampler.means() == {}


def test_only_the_first_rank_of_a_node_samples(ranks: Ranks) -> None:
    second = Ranks(0, 1, 1, 2, ranks.device, ranks.control)
    with NodeSampler(second) as sampler:
        assert not sampler._thread.is_alive()
        assert sampler.means() == {}


def refused() -> None:
    raise PermissionError("/proc/net/dev")


@pytest.mark.parametrize("counters", [lambda: None, refused])
def test_what_a_container_does_not_show_is_said_once_and_left_out(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, counters: Callable[[], None]
) -> None:
    monkeypatch.setattr(psutil, "net_io_counters", counters)
    with NodeSampler(ranks) as sampler:
        means = first_means(sampler, bool)
        first_means(sampler, bool)
    assert {key.rpartition("/")[2] for key in means} == {"cpu_percent", "memory_gb"}
    assert len(caplog.records) == 1
    assert "the network of" in caplog.text


def test_gpus_that_cannot_be_measured_are_said_once_and_left_out(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu = replace(ranks, device=torch.device("cuda", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "utilization", refused)
        sampler = NodeSampler(on_gpu)
        found = [sampler._sample(), sampler._sample()]
    assert all("cpu_percent" in values and not any("gpu" in key for key in values) for values in found)
    assert len(caplog.records) == 1
    assert "the GPUs of" in caplog.text


def fake_nvml(gpus: list[dict[str, int]]) -> types.ModuleType:
    """NVIDIA's library over so many GPUs, as far as torch asks it."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError_DriverNotLoaded = OSError  # type: ignore[attr-defined]
    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": gpus.__getitem__,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu["percent"]),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=gpu["bytes"]),
        "nvmlDeviceGetPowerUsage": lambda gpu: gpu["milliwatts"],
        "nvmlDeviceGetTemperature": lambda gpu, sensor: gpu["celsius"] if sensor == 0 else None,
    }
    for name, answer in answers.items():
        setattr(nvml, name, answer)
    return nvml


def test_gpus_are_measured_through_nvml_by_the_numbers_that_this_process_sees(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [dict(percent=n, bytes=n * 10**9, milliwatts=n * 1000, celsius=30 + n) for n in range(4)]
    nvml = fake_nvml(gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for name, value in {
        "_HAS_PYNVML": True,
        "pynvml": nvml,
        "is_available": lambda: True,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    values = NodeSampler(replace(ranks, device=torch.device("cuda", 0)))._sample()
    assert {key: value for key, value in values.items() if key.startswith("gpu")} == {
        "gpu0/percent": 3, "gpu0/memory_gb": 3.0, "gpu0/watts": 3.0, "gpu0/celsius": 33,
        "gpu1/percent": 1, "gpu1/memory_gb": 1.0, "gpu1/watts": 1.0, "gpu1/celsius": 31,
    }  # fmt: skip
    assert not caplog.records


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nvidias_own_library_answers_for_every_gpu(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    values = NodeSampler(replace(ranks, device=torch.device("cuda", 0)))._sample()
    assert not caplog.records
    for gpu in range(torch.cuda.device_count()):
        assert 0 <= values[f"gpu{gpu}/percent"] <= 100
        assert 0 < values[f"gpu{gpu}/memory_gb"] * 1e9 <= torch.cuda.get_device_properties(gpu).total_memory


def test_the_package_asks_for_nvidias_library() -> None:
    """torch does not: without it no GPU is measured."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(needed.startswith("nvidia-ml-py") for needed in project["dependencies"])


def test_of_many_nodes_the_spread_is_told_and_of_few_each(ranks: Ranks) -> None:
    def means_of(node: int) -> dict[str, float]:
        return {"cpu_percent": float(node), "gpu0/percent": 10.0 * node, "gpu1/percent": 10.0 * node + 4}

    def told(num_nodes: int) -> dict[str, float]:
        def of_node(meeting_ranks: ThreadRanks) -> dict[str, float]:
            meeting_ranks.ranks_per_node, meeting_ranks.device = 1, ranks.device
            sampler = NodeSampler(cast(Ranks, meeting_ranks))
            sampler._name = f"n{meeting_ranks.rank}"
            for key, value in means_of(meeting_ranks.rank).items():
                sampler._samples[key] += [value - 1, value + 1]
            return sampler.means()

        results = on_ranks(num_nodes, of_node)
        assert all(result == results[0] for result in results)
        return cast(dict[str, float], results[0])

    few = told(2)
    assert few == {f"n{node}/{key}": value for node in (0, 1) for key, value in means_of(node).items()}
    assert told(system_metrics.MOST_NODES + 1) == {
        "min/cpu_percent": 0, "mean/cpu_percent": 8, "max/cpu_percent": 16,
        "min/gpu/percent": 0, "mean/gpu/percent": 82, "max/gpu/percent": 164,
    }  # fmt: skip


@dataclass
class Group:
    """One of two ranks: the other one sends `other`."""

    is_rank_zero: bool
    other: list[float]
    sent: list[list[float]] = field(default_factory=list)
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sent.append(values.tolist())
        return values + torch.tensor(self.other, dtype=values.dtype)


class Asked:
    """Counts how often all ranks are asked for their means."""

    def __init__(self, means: dict[str, float]) -> None:
        self.found, self.times = means, 0

    def means(self) -> dict[str, float]:
        self.times += 1
        return self.found


def logger_of(group: Group, sampler: Asked, run_log: Any = None) -> MetricsLogger:
    engine = SimpleNamespace(gradient_norm=lambda: 1.0, loss_scale=lambda: 1.0)
    bar = SimpleNamespace(show=lambda *_: None)
    parts: Any = (group, engine, sampler, run_log, 0, bar, lambda *_: 0.5)
    return MetricsLogger(*parts)


def log_after(logger: MetricsLogger, step: int, seconds: float, stop_seconds: float = 0.0) -> None:
    """One step, and its log line after so many seconds of training."""
    sums = dict.fromkeys(("target_tokens", "source_tokens", "padded_tokens", "straggler_ratio"), 1)
    texts: Any = {"pairs_by_corpus": {}, "dropped": {}, "partition": SimpleNamespace(epoch=0), "digest": ""}
    batch: Any = SimpleNamespace(**sums, **texts)
    logger.start_clock()
    logger.count(batch, torch.zeros(2, dtype=torch.float64))
    logger.exclude(-seconds)
    counts = {"step": step, "skipped_updates": 0, "total_target_tokens": step}
    progress: Any = SimpleNamespace(**counts, position=SimpleNamespace(ever_quarantined=()))
    logger.log(progress, 0.1, stop_seconds)


@pytest.mark.parametrize(("stop", "expected"), [(0.0, (100, None)), (90.0, (10, 90))])
def test_a_suspension_counts_for_no_speed(stop: float, expected: tuple[int, int | None]) -> None:
    written: list[dict[str, Any]] = []
    run_log = SimpleNamespace(metrics=SimpleNamespace(append=lambda _, step, values: written.append(values)))
    log_after(logger_of(Group(is_rank_zero=True, other=[0.0, 0.0, 0.0]), Asked({}), run_log), 1, 100, stop)
    [values] = written
    assert (round(1 / values["tokens_per_second"]), values.get("stop_seconds")) == expected


def test_the_first_rank_counts_training_seconds_between_records_and_begins_at_once() -> None:
    group, sampler = Group(is_rank_zero=True, other=[0.0, 0.0, 0.0]), Asked({"n1/cpu_percent": 1.0})
    logger = logger_of(group, sampler)
    asked = []
    for step, seconds in enumerate((2, 20, 9, 2, 40, 1), start=1):
        log_after(logger, step, seconds)
        asked.append(sampler.times)
    assert asked == [1, 1, 1, 2, 3, 3]
    assert [round(sent[2]) for sent in group.sent] == [32, 20, 29, 31, 40, 1]


def test_before_the_first_sample_every_log_line_asks_again() -> None:
    group, sampler = Group(is_rank_zero=True, other=[0.0, 0.0, 0.0]), Asked({})
    logger = logger_of(group, sampler)
    for step in (1, 2):
        log_after(logger, step, 1)
    sampler.found = {"n1/cpu_percent": 1.0}
    for step in (3, 4):
        log_after(logger, step, 1)
    assert sampler.times == 3


@pytest.mark.parametrize(("first_says", "times"), [(29.9, 0), (30.0, 1)])
def test_other_ranks_go_by_the_first_ones_clock(first_says: float, times: int) -> None:
    group, sampler = Group(is_rank_zero=False, other=[0.0, 0.0, first_says]), Asked({"n1/cpu_percent": 1.0})
    log_after(logger_of(group, sampler), 1, 100)
    assert sampler.times == times
    assert group.sent[0][2] == 0


@pytest.mark.slow
def test_a_process_knows_when_it_began() -> None:
    asked = time.time()
    lines = ("from dist_transformer.training.metrics.system_metrics import process_began", "print(process_began())")
    said = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True).stdout
    assert asked - 0.05 <= float(said) <= time.time()
