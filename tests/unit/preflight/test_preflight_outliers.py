"""Which node is blamed: properties that hold for any cluster, and the cases a person would judge at a glance."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.preflight.outliers import DONE, REACHES_FIRST, Judgement, judge

SPEEDS = ("matmul_tflops", "exchange_gb_per_second", "disk_write_mb_per_second", "memory_total_gb", "cpus")


def record(rank: int, speed: float = 50.0, *, ranks_per_node: int = 1, num_ranks: int = 0, **measures: float) -> Any:
    """What a rank writes whose machine has that speed in everything."""
    return {
        "rank": rank,
        "node": f"n{rank // ranks_per_node + 1}",
        "num_ranks": num_ranks,
        "ranks_per_node": ranks_per_node,
        "device": "cpu",
        "measures": {**dict.fromkeys(SPEEDS, speed), "gpus": 8.0, "clock_offset_seconds": 0.0, **measures},
        "versions": {"torch": "2.13"},
        "warnings": [],
        "together": DONE,
    }


def job(speeds: list[float], **changes: dict[int, float]) -> list[Any]:
    """A rank for each speed; `changes` gives single ranks another value of a measure."""
    own = [{name: values[rank] for name, values in changes.items() if rank in values} for rank in range(len(speeds))]
    return [record(rank, speed, **own[rank]) for rank, speed in enumerate(speeds)]


def nodes_of(records: list[Any]) -> list[str]:
    return [r["node"] for r in records]


def blamed(found: Judgement) -> dict[str, set[str]]:
    return {outlier.node: {o.measure for o in found.outliers if o.node == outlier.node} for outlier in found.outliers}


speeds_of_nodes = st.lists(st.floats(1.0, 100.0), min_size=1, max_size=40)
tolerances = st.floats(0.1, 1.0)


@given(speeds_of_nodes, tolerances, st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_ranks_does_not_matter(speeds, tolerance, generator: random.Random):
    records = job(speeds)
    shuffled = records[:]
    generator.shuffle(shuffled)
    assert judge(shuffled, nodes_of(shuffled), tolerance) == judge(records, nodes_of(records), tolerance)


@given(speeds_of_nodes, tolerances, st.lists(st.integers(0, 60), max_size=30))
def test_at_most_a_tenth_is_excluded_and_always_the_worst(speeds, tolerance, more_nodes):
    nodes = sorted({*(f"n{rank + 1}" for rank in range(len(speeds))), *(f"n{number}" for number in more_nodes)})
    found = judge(job(speeds), nodes, tolerance)
    assert len(found.exclude) <= max(1, len(nodes) // 10)
    assert found.exclude == found.bad[: len(found.exclude)]
    assert bool(found.exclude) == bool(found.bad)
    if len(found.bad) > len(found.exclude):
        assert any(f"{len(found.bad)} nodes stand out" in warning for warning in found.warnings)


@given(speeds_of_nodes, tolerances, st.sampled_from([2.0**k for k in (-30, -3, 5, 20)]))
def test_a_cluster_that_is_faster_in_everything_is_judged_the_same(speeds, tolerance, factor):
    found = judge(job(speeds), [], tolerance)
    scaled = judge(job([speed * factor for speed in speeds]), [], tolerance)
    assert (scaled.bad, scaled.exclude, blamed(scaled)) == (found.bad, found.exclude, blamed(found))
    assert [outlier.ratio for outlier in scaled.outliers] == [outlier.ratio for outlier in found.outliers]


@given(st.floats(0.001, 1e6), st.integers(1, 30), tolerances)
def test_equal_nodes_have_no_outlier(speed, num_nodes, tolerance):
    found = judge(job([speed] * num_nodes), [], tolerance)
    assert (found.outliers, found.exclude, found.warnings, found.complete) == ([], [], [], True)


@given(st.floats(1.0, 100.0), st.floats(0.01, 0.79), st.booleans())
def test_of_two_nodes_that_differ_the_slower_one_is_named(speed, share, is_first_slow):
    speeds = [speed * share, speed] if is_first_slow else [speed, speed * share]
    assert judge(job(speeds), [], 0.8).exclude == ["n1" if is_first_slow else "n2"]


def test_a_node_is_as_good_as_its_worst_rank():
    records = [record(rank, 20.0 if rank == 5 else 50.0, ranks_per_node=2, num_ranks=8) for rank in range(8)]
    found = judge(records, [], 0.8)
    assert found.exclude == ["n3"]
    assert found.values["n3"]["matmul_tflops"] == 20.0
    waits = [record(rank, ranks_per_node=2, num_ranks=8, all_reduce_latency_seconds=0.01 * rank) for rank in range(8)]
    assert judge(waits, [], 0.8).values["n2"]["all_reduce_latency_seconds"] == 0.03


def test_a_shared_disk_may_be_slower_by_chance_but_not_by_much():
    assert judge(job([50.0] * 4, disk_write_mb_per_second={1: 20.0}), [], 0.8).outliers == []
    assert judge(job([50.0] * 4, disk_write_mb_per_second={1: 4.0}), [], 0.8).exclude == ["n2"]
    assert judge(job([50.0] * 4, disk_write_mb_per_second={1: 0.0}), [], 0.8).exclude == ["n2"]


def test_a_node_with_less_memory_than_others_is_as_healthy_as_they_are():
    found = judge(job([50.0] * 4, memory_total_gb={0: 512.0, 1: 512.0, 2: 512.0, 3: 256.0}), [], 0.8)
    assert (found.outliers, found.bad) == ([], [])
    assert found.values["n4"]["memory_total_gb"] == 256.0


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_wrong_clock_is_found_on_rank_0_too(wrong):
    offsets = dict.fromkeys(range(4), 0.0) | {wrong: 30.0}
    if wrong == 0:  # the others are measured against it
        offsets = {0: 0.0, 1: -30.0, 2: -30.0, 3: -30.0}
    found = judge(job([50.0] * 4, clock_offset_seconds=offsets), [], 0.8)
    assert found.exclude == [f"n{wrong + 1}"]
    assert found.outliers[0].text == "clock +30 s away from the median"


def test_of_two_clocks_nobody_knows_which_is_wrong():
    found = judge(job([50.0] * 2, clock_offset_seconds={1: 30.0}), [], 0.8)
    assert found.exclude == []
    assert found.warnings == ["the clocks of the two nodes are 30 s apart"]


def test_a_missing_gpu_is_bad_against_the_other_nodes_and_against_what_slurm_gave():
    found = judge(job([50.0] * 3, gpus={1: 7.0}), [], 0.8)
    assert (found.exclude, found.outliers[0].text) == (["n2"], "7 GPUs of 8")
    assert judge(job([50.0], gpus_expected={0: 8.0}, gpus={0: 0.0}), [], 0.8).exclude == ["n1"]


def test_a_rank_that_wrote_nothing_marks_its_node():
    records = [record(rank, ranks_per_node=4, num_ranks=12) for rank in range(12) if rank != 6]
    found = judge(records, ["n1", "n2", "n3"], 0.8)
    assert (found.exclude, found.outliers[0].text, found.complete) == (["n2"], "3 ranks of 4", False)


def test_a_version_that_differs_from_the_majority_is_bad_and_without_a_majority_a_warning():
    records = job([50.0] * 3)
    records[1]["versions"] = {"torch": "2.12"}
    found = judge(records, [], 0.8)
    assert (found.exclude, found.outliers[0].text) == (["n2"], "torch is 2.12, most have 2.13")
    pair = judge(records[:2], [], 0.8)
    assert (pair.exclude, pair.warnings) == ([], ["torch differs: n1 2.13, n2 2.12"])


def test_a_silent_node_is_the_worst_and_if_all_are_silent_none_is_bad():
    found = judge(job([50.0, 10.0, 50.0]), ["n1", "n2", "n3", "n4"], 0.8)
    assert (found.silent, found.bad, found.exclude, found.complete) == (["n4"], ["n4", "n2"], ["n4"], False)
    nothing = judge([], ["n1", "n2"], 0.8)
    assert (nothing.silent, nothing.exclude, nothing.complete) == ([], [], False)


def test_warnings_exclude_nobody():
    records = job([50.0] * 3)
    records[1]["warnings"] = ["MLflow does not answer"]
    found = judge(records, [], 0.8)
    assert (found.warnings, found.exclude) == (["n2: MLflow does not answer"], [])


@pytest.mark.parametrize(("alone", "others"), [("no", "yes"), ("yes", "no")])
def test_a_node_without_a_network_is_named_and_so_is_that_of_rank_0_when_nobody_reaches_it(alone, others):
    records = job([50.0] * 4)
    for own in records:
        own["versions"][REACHES_FIRST] = others
    records[0]["versions"][REACHES_FIRST] = alone
    found = judge(records, [], 0.8)
    can = {"yes": "can", "no": "cannot"}
    assert found.exclude == ["n1"]
    assert found.outliers[0].text == f"{can[alone]} reach rank 0, most nodes {can[others]}"
