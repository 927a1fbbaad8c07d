"""What ranks measure: the plan of the exchanges, and the disk."""

import pytest
import torch

from dist_transformer.preflight import benchmarks
from dist_transformer.preflight.benchmarks import partners, ring_rounds


@pytest.mark.parametrize("num_nodes", range(1, 12))
def test_every_node_exchanges_with_both_neighbours_and_with_one_at_a_time(num_nodes):
    rounds = ring_rounds(num_nodes)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    met = {frozenset(pair) for pairs in rounds for pair in pairs}
    ring = {frozenset((node, (node + 1) % num_nodes)) for node in range(num_nodes)} if num_nodes > 1 else set()
    assert met == ring
    assert sum(map(len, rounds)) == len(ring)


def test_ranks_exchange_with_the_same_number_on_the_other_node_and_agree_on_it():
    nodes = [[0, 1, 2], [3, 4], [5, 6, 7]]
    for pairs in ring_rounds(3):
        held = [(nodes[a], nodes[b]) for a, b in pairs]
        for rank in range(8):
            for other in partners(rank, held):
                assert partners(other, held) == [rank]
    assert partners(1, [(nodes[0], nodes[1])]) == [4]
    assert partners(2, [(nodes[0], nodes[1])]) == []


@pytest.mark.parametrize(("is_native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_that_only_emulates_bf16_is_measured_in_fp16(monkeypatch, is_native, expected):
    """The GPU's products are not made here; only in what type they would be."""
    random, types = torch.randn, []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or is_native
    )
    monkeypatch.setattr(torch, "randn", lambda *sizes, device: random(2, 2))
    monkeypatch.setattr(benchmarks, "_products_a_second", lambda a, b, seconds: types.append((a.dtype, b.dtype)) or 1.0)
    benchmarks.matmul_tflops(torch.device("cuda", 0))
    assert set(types) == {(expected, expected)}


def test_the_disk_is_measured_with_a_file_that_does_not_stay(tmp_path):
    measures, warnings = benchmarks.disk(tmp_path)
    assert min(measures.values()) > 0.0
    assert list(tmp_path.iterdir()) == []
    assert all("GB are free" in text for text in warnings)


def test_a_disk_that_cannot_be_written_has_the_speed_0_and_is_named(tmp_path):
    measures, warnings = benchmarks.disk(tmp_path / "gone")
    assert measures == {"disk_write_mb_per_second": 0.0}
    assert str(tmp_path / "gone") in warnings[0]


def test_little_free_space_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "LOW_SPACE_GB", 1e9)
    _, warnings = benchmarks.disk(tmp_path)
    assert len(warnings) == 2
    assert f"GB are free in {tmp_path}" in warnings[0]
