"""Attention against its formula and against torch's own, in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.attention import CrossAttention, KeyValue, SelfAttention, attend, attention_weights
from dist_transformer.model.transformer import Transformer

D_MODEL, NUM_HEADS, HEAD_SIZE = 12, 3, 4


def self_attention(is_causal: bool = False) -> SelfAttention:
    module = SelfAttention(ModelConfig(d_model=D_MODEL, num_heads=NUM_HEADS), is_causal, None).double()
    torch.nn.init.normal_(module.query_key_value.bias)
    return module


def written_out(queries: Tensor, keys: Tensor, values: Tensor, may_attend: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V for one head of one sentence, number by number; (T, K), (S, K), (S, K), (T, S)."""
    rows = []
    for query, allowed in zip(queries, may_attend, strict=True):
        scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
        largest = max(score for score, ok in zip(scores, allowed, strict=True) if ok)
        powers = [math.exp(score - largest) if ok else 0.0 for score, ok in zip(scores, allowed, strict=True)]
        rows.append(sum(power / sum(powers) * value for power, value in zip(powers, values, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


def added(may_attend: Tensor) -> Tensor:
    """The mask as it is added to scores."""
    return torch.zeros(may_attend.shape, dtype=torch.float64).masked_fill(~may_attend, float("-inf"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_is_the_formula_written_out_head_by_head(is_causal: bool) -> None:
    module, inputs = self_attention(is_causal), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    may_attend = torch.ones(2, 5, 5, dtype=torch.bool)
    may_attend[1, :, 3:] = False
    if is_causal:
        may_attend = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    query, key, value = (
        F.linear(inputs, weight, bias)
        for weight, bias in zip(
            module.query_key_value.weight.chunk(3), module.query_key_value.bias.chunk(3), strict=True
        )
    )
    heads = [slice(start, start + HEAD_SIZE) for start in range(0, D_MODEL, HEAD_SIZE)]
    query, key, value = query.detach(), key.detach(), value.detach()
    attended = torch.stack(
        [
            torch.cat([written_out(query[b][:, h], key[b][:, h], value[b][:, h], may_attend[b]) for h in heads], 1)
            for b in range(2)
        ]
    )
    given = module(inputs) if is_causal else module(inputs, added(may_attend[:, None, :1, :]))
    torch.testing.assert_close(given, module.output(attended))


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_are_split_as_in_torchs_multi_head_attention(is_causal: bool) -> None:
    module, inputs = self_attention(is_causal), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    theirs, _ = F.multi_head_attention_forward(
        *[inputs.transpose(0, 1)] * 3,
        D_MODEL,
        NUM_HEADS,
        module.query_key_value.weight,
        module.query_key_value.bias,
        None,
        None,
        False,
        0.0,
        module.output.weight,
        module.output.bias,
        attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1) if is_causal else None,
    )
    torch.testing.assert_close(module(inputs), theirs.transpose(0, 1))


def test_cross_attention_equals_torchs_multi_head_attention() -> None:
    module = CrossAttention(ModelConfig(d_model=D_MODEL, num_heads=NUM_HEADS)).double()
    torch.nn.init.normal_(module.key_value.bias)
    queries, memory = torch.randn(2, 5, D_MODEL).double(), torch.randn(2, 6, D_MODEL).double()
    is_real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    theirs, weights = F.multi_head_attention_forward(
        queries.transpose(0, 1),
        *[memory.transpose(0, 1)] * 2,
        D_MODEL,
        NUM_HEADS,
        torch.cat([module.query.weight, module.key_value.weight]),
        torch.cat([module.query.bias, module.key_value.bias]),
        None,
        None,
        False,
        0.0,
        module.output.weight,
        module.output.bias,
        key_padding_mask=~is_real,
        average_attn_weights=False,
    )
    mask = added(is_real[:, None, None, :])
    torch.testing.assert_close(module(queries, memory, mask), theirs.transpose(0, 1))
    torch.testing.assert_close(module.weights(queries, memory, mask), weights)


def test_softmax_stays_finite_and_exact_with_huge_scores() -> None:
    """A softmax that does not subtract the largest score gives infinity over infinity here."""
    module, inputs = self_attention().float(), torch.randn(1, 4, D_MODEL) * 1e4
    assert module(inputs).isfinite().all()
    weights = module.weights(inputs)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, NUM_HEADS, 4))


def test_masked_keys_get_exactly_zero_weight_even_against_very_low_scores() -> None:
    """A mask that writes a tiny or a merely large negative number would let the padding win here."""
    query, key = torch.full((1, 1, 2, 1), 1e6), torch.full((1, 1, 3, 1), -1e6)
    key[..., 2, :] = 0.0
    weights = attention_weights(query, key, added(torch.tensor([True, True, False])[None, None, None]))
    assert torch.equal(weights, torch.tensor([0.5, 0.5, 0.0]).expand(1, 1, 2, 3))


def test_what_is_written_in_padding_reaches_no_output() -> None:
    module, inputs = self_attention(), torch.randn(1, 5, D_MODEL, dtype=torch.float64)
    mask = added(torch.tensor([True, True, True, False, False])[None, None, None])
    changed = inputs.clone()
    changed[:, 3:] = 1e6
    assert torch.equal(module(inputs, mask)[:, :3], module(changed, mask)[:, :3])


def test_queries_keys_and_values_have_three_matrices_of_their_own() -> None:
    module, inputs = self_attention(), torch.randn(1, 5, D_MODEL, dtype=torch.float64)
    query, key, value = module.query_key_value.weight.chunk(3)
    assert not torch.equal(query, key)
    assert not torch.equal(key, value)
    weights, output = module.weights(inputs), module(inputs)
    with torch.no_grad():
        value += torch.randn_like(value)
    assert torch.equal(module.weights(inputs), weights)
    assert not torch.allclose(module(inputs), output)
    with torch.no_grad():
        key += torch.randn_like(key)
    assert not torch.allclose(module.weights(inputs), weights)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_weights_shown_are_those_attention_uses(is_causal: bool) -> None:
    module, inputs = self_attention(is_causal), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    value = F.linear(inputs, module.query_key_value.weight[2 * D_MODEL :], module.query_key_value.bias[2 * D_MODEL :])
    value_heads = value.view(2, 5, NUM_HEADS, HEAD_SIZE).transpose(1, 2)
    attended = (module.weights(inputs) @ value_heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(inputs), module.output(attended))


def test_keys_and_values_of_odd_sizes_are_the_formula_written_out_head_by_head() -> None:
    key_size, value_size = 5, 2
    sizes = {"key_size": key_size, "value_size": value_size}
    module = CrossAttention(ModelConfig(d_model=D_MODEL, num_heads=NUM_HEADS, **sizes)).double()
    inputs, memory = torch.randn(1, 4, D_MODEL).double(), torch.randn(1, 6, D_MODEL).double()
    keys = NUM_HEADS * key_size
    query = module.query(inputs)[0].detach()
    key, value = module.key_value(memory)[0].detach()[:, :keys], module.key_value(memory)[0].detach()[:, keys:]
    may_attend = torch.ones(4, 6, dtype=torch.bool)
    attended = torch.cat(
        [
            written_out(
                query[:, h * key_size : (h + 1) * key_size],
                key[:, h * key_size : (h + 1) * key_size],
                value[:, h * value_size : (h + 1) * value_size],
                may_attend,
            )
            for h in range(NUM_HEADS)
        ],
        1,
    )
    torch.testing.assert_close(module(inputs, memory, None)[0], module.output(attended))


@pytest.mark.parametrize("length", [1, 7, 8, 11, 16])
def test_masks_of_padding_lie_as_cudas_kernel_takes_them_without_a_copy(length: int) -> None:
    """Every stride but the last is a multiple of 8 elements (`aligned_tensor` and `pad_bias` of torch's attention.cpp)."""
    model = Transformer(ModelConfig(preset="tiny"), 9, 9, 0)
    source = torch.randint(1, 9, (3, length))
    source[1:, length // 2 :] = 0
    mask = model._mask(source)
    assert mask.shape == (3, 1, 1, length)
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
    assert mask.stride()[-1] == 1
    assert torch.equal(mask.isneginf()[:, 0, 0], source == 0)
    assert torch.equal(mask[:, 0, 0] == 0, source != 0)


@pytest.mark.parametrize(("length", "may_be_flash"), [(28, False), (128, False), (129, True)])
def test_on_a_gpu_short_queries_go_to_the_memory_efficient_kernel(
    length: int, may_be_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def attention(query: Tensor, *_: Any, **__: Any) -> Tensor:
        found.append(torch.backends.cuda.flash_sdp_enabled())
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        query = torch.empty(1, 2, length, 8, device="cuda")
        attend(query, KeyValue(query, query), is_causal=True)
    assert found == [may_be_flash]
    torch.backends.cuda.enable_flash_sdp(True)
