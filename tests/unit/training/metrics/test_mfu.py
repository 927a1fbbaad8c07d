"""The peak of a device, and the share of it that is said to be reached."""

import resource
from collections import Counter

import pytest
import torch

from dist_transformer.config.schema import ModelConfig
from dist_transformer.planning.flops import model_flops
from dist_transformer.training.metrics import mfu
from dist_transformer.training.metrics.mfu import mfu_of, peak_of
from dist_transformer.training.train_state import Interval

MODEL = ModelConfig(preset="tiny")
CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_cpu_has_the_peak_that_is_measured_and_the_random_state_stays(precision):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    peak, is_published = peak_of(CPU, precision)
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_published
    assert 1e7 < peak < 1e15


def test_the_peak_of_a_cpu_is_that_of_the_fastest_products_of_a_step(monkeypatch):
    """Parts of a step in a short precision are fp32 there, where few CPUs multiply fp16 as fast."""
    rates = {torch.float32: 3e9, torch.float16: 1e8, torch.bfloat16: 5e9}
    monkeypatch.setattr(mfu, "measured_flops", lambda device, dtype, seconds: rates[dtype])
    found = {precision: peak_of(CPU, precision)[0] for precision in ("fp32", "fp16", "bf16")}
    assert found == {"fp32": 3e9, "fp16": 3e9, "bf16": 5e9}


def test_memory_that_is_short_for_the_measurement_of_a_peak_ends_no_run(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(mfu, "SMALLEST", 2**20)
    monkeypatch.setattr(mfu, "LARGEST", 2**21)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**40, limits[1]))
        assert peak_of(CPU, "bf16") == (0.0, False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert mfu_of(MODEL, 500, 0.0, Interval(torch.zeros(2), target_tokens=700, source_tokens=900), 4.0) == 0.0


def test_mfu_is_never_above_the_whole():
    """A peak may be measured in a busy moment."""
    interval = Interval(torch.zeros(2), target_tokens=700, source_tokens=900)
    assert mfu_of(MODEL, 500, 1.0, interval, 4.0) == 1.0


def test_a_gpu_of_the_table_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    assert peak_of(torch.device("cuda"), "bf16") == (pytest.approx(989e12), True)


def test_mfu_is_the_model_flops_of_the_real_tokens_over_what_all_ranks_could_have_done():
    interval = Interval(torch.zeros(2), target_tokens=700, source_tokens=900, padded_tokens=5000)
    interval.pairs_by_corpus = Counter(news=20, talks=10)
    flops = model_flops(MODEL, 500, 30, 900, 700).total
    assert mfu_of(MODEL, 500, 2 * 3e9, interval, 4.0) == pytest.approx(flops / (4 * 6e9))
    doubled = Interval(torch.zeros(2), target_tokens=1400, source_tokens=1800)
    doubled.pairs_by_corpus = Counter(news=60)
    assert mfu_of(MODEL, 500, 6e9, doubled, 8.0) == pytest.approx(flops / (4 * 6e9))
