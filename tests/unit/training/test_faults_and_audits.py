"""Which rank is wrong, what is audited, when two gradients count as the same, and when a node is excluded."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dist_transformer.config.schema import ModelConfig, TrainingConfig
from dist_transformer.errors import UserError
from dist_transformer.files import read_json
from dist_transformer.model import gpu_kernels
from dist_transformer.run.folder import RunDir
from dist_transformer.training import silent_errors
from dist_transformer.training.silent_errors import BOUND, SilentErrors, alike, begin_checks, minority


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ("aaaa", []), ("aaba", [2]), ("ab", [0, 1]), ("aab", [2]), ("abc", [0, 1, 2]),
        ("aabb", [0, 1, 2, 3]), ("baac", [0, 3]), ("a", []),
    ],
)  # fmt: skip
def test_those_that_differ_from_most_are_wrong_and_all_where_none_is_most_frequent(values, wrong):
    assert minority(values) == wrong


def test_gradients_are_the_same_bit_by_bit_or_within_a_bound_of_the_whole_norm():
    bits = torch.tensor([1, 2, 3])
    assert alike(bits, bits.clone())
    assert not alike(bits, torch.tensor([1, 2, 4]))
    norms = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)  # 5 in all
    for change, expected in ((0.9 * BOUND * 5, True), (1.1 * BOUND * 5, False)):
        changed = norms.clone()
        changed[2] += change
        assert alike(norms, changed) == alike(changed, norms) == expected
    infinite = torch.tensor([3.0, math.inf, 0.0], dtype=torch.float64)
    assert alike(infinite, infinite.clone())
    assert not alike(infinite, norms)


def checks(tmp_path, share=0.03, nodes=("n1", "n2"), num_ranks=2) -> SilentErrors:
    ranks = SimpleNamespace(rank=0, num_ranks=num_ranks)
    config = SimpleNamespace(training=SimpleNamespace(audit_share=share), run=SimpleNamespace(seed=7))
    return SilentErrors(SimpleNamespace(config=config, ranks=ranks, run_dir=RunDir(tmp_path)), None, nodes)


def test_the_audited_share_is_drawn_by_seed_and_step_alone(tmp_path):
    drawn = [[checks(tmp_path).is_audited(batch, first) for first in range(4)] for batch in range(5000)]
    assert drawn == [[checks(tmp_path).is_audited(batch, first) for first in range(4)] for batch in range(5000)]
    assert sum(map(sum, drawn)) / 20_000 == pytest.approx(0.03, abs=0.005)
    assert not any(checks(tmp_path, share=0.0).is_audited(batch, 0) for batch in range(5000))
    assert all(checks(tmp_path, share=1.0).is_audited(batch, 0) for batch in range(5000))


def test_a_node_is_excluded_at_its_second_fault_if_it_is_certain_and_there_is_a_job(tmp_path):
    run_dir, found = RunDir(tmp_path), checks(tmp_path)
    for step in (1, 2):
        assert found._write(step, {1: "wrong"}) == []  # no job
    run_dir.slurm.mkdir()
    assert found._write(3, {0: "wrong", 1: "wrong"}) == []  # either of the two may be right
    assert found._write(4, {1: "wrong"}) == ["n2"]
    assert read_json(run_dir.excluded) == {"n2": "step 4: wrong"}
    assert found._write(5, {0: "wrong"}) == []  # as many as the limits allow are excluded


def test_the_first_fault_of_a_node_excludes_nothing_and_ranks_of_one_node_are_certain(tmp_path):
    RunDir(tmp_path).slurm.mkdir()
    found = checks(tmp_path, nodes=("n1", "n1"))
    assert found._write(1, {0: "wrong", 1: "wrong"}) == []
    assert found._write(2, {0: "wrong", 1: "wrong"}) == ["n1"]


@pytest.mark.parametrize(
    ("kinds", "dropout", "is_refused"),
    [("H100 A100", 0.1, True), ("H100 A100", 0.0, False), ("H100 H100", 0.1, False)],
)
def test_gpus_of_different_kinds_which_draw_other_masks_are_not_audited(monkeypatch, kinds, dropout, is_refused):
    """F.dropout on CUDA deals elements to as many threads as the GPU has: the same seed gives other masks."""
    nodes = [("n1", kinds.split()[0], 1, True), ("n2", kinds.split()[1], 1, True)]
    ranks = SimpleNamespace(device=torch.device("cuda"), all_gather_object=lambda _: nodes)
    config = ModelConfig(preset="tiny", dropout=dropout)
    config = SimpleNamespace(
        training=TrainingConfig(audit_share=0.1, zero_stage=1), model=config, run=SimpleNamespace(seed=7)
    )
    engine = SimpleNamespace(gradient_sums=SimpleNamespace(is_exact=True))
    monkeypatch.setattr(silent_errors, "machine_name", lambda _: "H100")
    monkeypatch.setattr(gpu_kernels, "run_here", lambda: True)
    monkeypatch.setattr(gpu_kernels, "is_off", False)
    with pytest.raises(UserError, match=r"audit_share.*A100, H100") if is_refused else nullcontext():
        begin_checks(SimpleNamespace(ranks=ranks, config=config, run_dir=None), engine)
    assert not engine.gradient_sums.is_exact


@pytest.mark.parametrize(
    ("precision", "of_second", "named", "is_used"),
    [("bf16", [False], "on n2, whose", False), ("bf16", [True], "", True), ("fp32", [], "", True)],
)
def test_where_kernels_of_ours_fail_on_one_node_no_rank_uses_them(
    monkeypatch, caplog, precision, of_second, named, is_used
):
    """With its padding a batch has other dropout masks: an audit would find the node to compute wrongly."""
    monkeypatch.setattr(silent_errors, "machine_name", lambda _: "H100")
    monkeypatch.setattr(gpu_kernels, "run_here", lambda: True)
    monkeypatch.setattr(gpu_kernels, "is_off", False)
    asked = []

    def gathered(mine):
        asked.append(mine[-1])
        return [("n1", "H100", 1, mine[-1]), *[("n2", "H100", 1, has) for has in of_second]]

    ranks = SimpleNamespace(device=torch.device("cuda"), is_rank_zero=True, all_gather_object=gathered)
    config = SimpleNamespace(
        training=TrainingConfig(precision=precision), model=ModelConfig(preset="tiny"), run=SimpleNamespace(seed=7)
    )
    engine = SimpleNamespace(gradient_sums=SimpleNamespace())
    begin_checks(SimpleNamespace(ranks=ranks, config=config, run_dir=None), engine)
    assert gpu_kernels.has_kernels() == is_used
    assert asked == [precision == "bf16"]  # in fp32 nothing is compiled
    assert [named in record.getMessage() for record in caplog.records] == [True] * bool(named)
