"""The sampler of a node, on this machine."""

import threading
import time
from collections.abc import Callable

import psutil
import pytest

from dist_transformer.distributed import Ranks
from dist_transformer.training import system_metrics
from dist_transformer.training.system_metrics import NodeSampler


@pytest.fixture(autouse=True)
def frequent_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_SECONDS", 0.05)


def first_means(sampler: NodeSampler, is_wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    deadline = time.monotonic() + 30
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


def test_work_shows_in_the_use_of_the_processors(ranks: Ranks) -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            pass

    with NodeSampler(ranks) as sampler:
        threading.Thread(target=work, daemon=True).start()
        one_core = 100 / psutil.cpu_count()
        means = first_means(sampler, lambda means: next(iter(means.values())) > one_core / 2)
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
    second = Ranks(0, 1, 1, 2, ranks.device, ranks.control, ranks.timeout)
    with NodeSampler(second) as sampler:
        assert not sampler._thread.is_alive()
        assert sampler.means() == {}


def test_gpus_that_cannot_be_measured_are_said_once_and_left_out(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = NodeSampler(ranks)
    sampler._num_gpus = 1  # this machine has none: NVML refuses
    assert sampler._gpus() == {}
    assert sampler._gpus() == {}
    assert len(caplog.records) == 1
    assert "the GPUs of" in caplog.text
