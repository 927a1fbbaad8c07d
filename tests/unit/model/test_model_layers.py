"""Add & norm, feed-forward and positions against their formulas."""

import math
from collections.abc import Callable

import torch

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.layers import AddAndNorm, FeedForward, SinusoidalPositions, sinusoids


def test_layer_norm_has_a_gain_and_a_bias_for_each_dimension(make_config: Callable[..., ModelConfig]) -> None:
    block, inputs = AddAndNorm(make_config()).double(), torch.randn(2, 3, 16, dtype=torch.float64)
    assert block.norm.weight.shape == block.norm.bias.shape == (16,)
    with torch.no_grad():
        block.norm.weight.copy_(torch.randn(16))
        block.norm.bias.copy_(torch.randn(16))
    normalised = (inputs - inputs.mean(-1, keepdim=True)) / (inputs.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = normalised * block.norm.weight + block.norm.bias
    torch.testing.assert_close(block(inputs, torch.zeros_like), expected)


def test_post_norm_normalises_the_sum_of_input_and_sublayer(make_config: Callable[..., ModelConfig]) -> None:
    block, inputs = AddAndNorm(make_config(norm="post")).double(), torch.randn(2, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(block(inputs, torch.square), block.norm(inputs + inputs.square()))


def test_pre_norm_normalises_the_sublayers_input_only(make_config: Callable[..., ModelConfig]) -> None:
    block, inputs = AddAndNorm(make_config(norm="pre")).double(), torch.randn(2, 3, 16, dtype=torch.float64)
    torch.testing.assert_close(block(inputs, torch.square), inputs + block.norm(inputs).square())


def test_dropout_acts_on_the_sublayers_output_and_not_on_the_residual(make_config: Callable[..., ModelConfig]) -> None:
    block, inputs = AddAndNorm(make_config(norm="pre", dropout=0.25)), torch.full((50, 50, 16), 7.0)
    added = block(inputs, torch.ones_like) - inputs
    kept = added != 0
    torch.testing.assert_close(added[kept], torch.full_like(added[kept], 1 / 0.75), rtol=1e-5, atol=1e-5)
    assert abs(kept.float().mean() - 0.75) < 0.01


def test_feed_forward_is_equation_2() -> None:
    network, inputs = FeedForward(6, 10).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    inner = torch.maximum(torch.tensor(0.0), inputs @ network.inner.weight.T + network.inner.bias)
    torch.testing.assert_close(network(inputs), inner @ network.outer.weight.T + network.outer.bias)


def test_positions_are_the_sines_and_cosines_of_section_3_5() -> None:
    d_model = 10
    expected = [
        [
            function(position / 10000 ** (2 * i / d_model))
            for i in range(d_model // 2)
            for function in (math.sin, math.cos)
        ]
        for position in (*range(5), 4999)
    ]
    torch.testing.assert_close(sinusoids(5000, d_model)[[0, 1, 2, 3, 4, 4999]], torch.tensor(expected))


def test_positions_of_any_start_and_length_are_slices_of_one_table() -> None:
    positions, like = SinusoidalPositions(6), torch.empty(0)
    table = sinusoids(3000, 6)
    for start, length in ((0, 3), (250, 20), (2990, 10), (7, 1)):
        assert torch.equal(positions(start, length, like), table[start : start + length])


def test_positions_of_a_half_precision_model_are_rounded_once_from_fp32() -> None:
    positions = SinusoidalPositions(6).half()
    given = positions(4000, 20, torch.empty(0, dtype=torch.float16))
    assert torch.equal(given, sinusoids(4020, 6)[4000:].half())
    assert not positions.state_dict()
