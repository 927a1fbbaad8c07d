"""Sums of bits: what they show of tensors, of memory at rest, and of a gradient that is computed a second time."""

import pytest
import torch
from plain_torch import tokens_of

from dist_transformer.training.engine import bit_sums
from dist_transformer.training.engine.bit_sums import RestingSums, bit_sum, sums_by_part
from dist_transformer.training.engine.optimizer import PARTS
from dist_transformer.training.engine.sharded_state import Fragment


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_single_flipped_bit_changes_the_sum(dtype):
    tensor = torch.randn(3, 5).to(dtype)
    words = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16)
    width = 8 * tensor.element_size()
    before, changed = int(bit_sum([tensor])), set()
    for bit in range(width):
        words[1, 2] ^= -(1 << bit) if bit == width - 1 else 1 << bit
        changed.add(int(bit_sum([tensor])) - before)
        words[1, 2] ^= -(1 << bit) if bit == width - 1 else 1 << bit
    assert int(bit_sum([tensor])) == before
    assert {abs(change) for change in changed} == {1 << bit for bit in range(width)}


def test_the_sum_is_the_same_however_tensors_are_cut_and_added(monkeypatch):
    tensor = torch.randn(7, 11)
    whole = int(bit_sum([tensor]))
    assert int(bit_sum(tensor.flatten().split(13))) == whole
    assert int(bit_sum([tensor.t()])) == whole
    monkeypatch.setattr(bit_sums, "ADDED_AT_ONCE", 10)
    assert int(bit_sum([tensor])) == int(bit_sum([tensor.t()])) == whole
    assert int(bit_sum([])) == 0
    cut = [Fragment("exp_avg", "a", 13 * n, part) for n, part in enumerate(tensor.flatten().split(13))]
    assert dict(zip(PARTS, sums_by_part(cut).tolist(), strict=True))["exp_avg"] == whole


def test_weights_on_two_devices_are_added_on_each_apart(monkeypatch):
    """As with `freeze` and `offload` on a GPU, for which `meta` stands here: what is on it is added as 7."""

    def of_one_device(tensors):
        tensors = list(tensors)
        (device,) = {tensor.device for tensor in tensors}
        return bit_sum(tensors) if device.type == "cpu" else torch.tensor(7)

    monkeypatch.setattr(bit_sums, "bit_sum", of_one_device)
    here, there = torch.randn(5), torch.empty(3, device="meta")
    mixed = [Fragment("weight", name, 0, values) for name, values in (("a", there), ("b", here), ("c", there))]
    found = dict(zip(PARTS, sums_by_part(mixed).tolist(), strict=True))
    assert found == {**dict.fromkeys(PARTS, 0), "weight": int(bit_sum([here])) + 7}


def test_memory_that_changes_between_two_uses_is_reported_by_its_kind_once_it_was_checked():
    sums, weights, moments = RestingSums(), torch.ones(4), torch.ones(4)
    for name, tensor in (("weights 0", weights), ("weights 1", weights[:2]), ("moments", moments)):
        sums.note(name, [tensor])
    weights[3] = 2.0
    assert sums.changed() == []
    for name, tensor in (("weights 1", weights[:2]), ("weights 0", weights), ("moments", moments)):
        sums.check(name, [tensor])
    assert sums.changed() == ["weights"]
    sums.note("moments", [moments])
    sums.forget("moments")
    moments[0] = 3.0
    sums.check("moments", [moments])
    assert sums.changed() == ["weights"]


SETTINGS = [
    dict(zero_stage=0, precision="fp32"),
    dict(zero_stage=0, precision="bf16", activation_checkpointing=True),
    dict(zero_stage=1, precision="fp32", freeze=("*embedding*",)),
    dict(zero_stage=1, precision="bf16"),
    dict(zero_stage=1, precision="fp16", initial_loss_scale=1024),
    dict(zero_stage=2, precision="fp16", initial_loss_scale=1024, ema_decay=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_gradient_computed_again_has_the_same_numbers_and_adds_nothing_to_the_step(
    make_engine, batches, settings, is_exact
):
    def train(engine, is_audited: bool) -> torch.Tensor:
        for step in range(2):
            for number, micro_batch in enumerate(batches[4 * step : 4 * step + 4]):
                if is_audited:
                    engine.gradient_sums.start()
                torch.manual_seed(number)
                loss, _ = engine(*micro_batch)
                engine.backward(loss, tokens_of(batches[:4]))
                if is_audited:
                    own = engine.gradient_sums.take()
                    torch.manual_seed(number)
                    again = engine.sums_of_backward(engine.objective(*micro_batch)[0], tokens_of(batches[:4]))
                    assert torch.equal(own, again)
                    assert own.dtype == (torch.int64 if is_exact else torch.float64)
                    assert own.count_nonzero() > len(own) // 2
                    others = engine.objective(*batches[number - 1])[0]
                    assert not torch.equal(own, engine.sums_of_backward(others, tokens_of(batches[:4])))
            assert engine.step(1e-2)
        assert engine.changed_at_rest() == []
        return torch.cat([fragment.values.clone() for fragment in engine.fragments()])

    audited = make_engine(dropout=0.3, audit_share=1.0, **settings)
    audited.gradient_sums.is_exact = is_exact
    assert torch.equal(train(audited, True), train(make_engine(dropout=0.3, **settings), False))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_whose_gradients_were_dropped_is_as_if_it_had_not_been_begun(make_engine, batches, stage):
    def train(engine, wrong: bool) -> torch.Tensor:
        for step in range(2):
            for drops in [True, False] if wrong else [False]:
                for number in (2 * step, 2 * step + 1):
                    loss, _ = engine(*batches[number])
                    engine.backward(2.0 * loss if drops else loss, 100, is_last=number % 2 == 1)
                if drops:
                    engine.drop_gradients()
            assert engine.step(1e-2)
        assert engine.changed_at_rest() == []
        return torch.cat([fragment.values.clone() for fragment in engine.fragments()])

    settings = dict(zero_stage=stage, audit_share=1.0)
    assert torch.equal(train(make_engine(**settings), True), train(make_engine(**settings), False))
