"""Sums of gradients in fixed point: the same bits in every order and cut, and as exact as fp32's own."""

import random

import pytest
import torch
from torch import Tensor

from dist_transformer.config.schema import OptimizerConfig
from dist_transformer.training.engine.fixed_point import CPU_CHUNK, GRADIENT_UNIT, norm_of, sum_with, sums_of_squares
from dist_transformer.training.engine.optimizer import build_optimizer

SIZE = CPU_CHUNK + 7


@pytest.fixture
def lanes() -> list[Tensor]:
    """Gradients from 1e-16 to 10 of both signs, with many that lie halfway between two multiples of the unit."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.empty(6, SIZE).uniform_(-16, 1, generator=generator)
    values = torch.randn(6, SIZE, generator=generator) * 10**exponents
    values[:, ::5] = (2 * torch.randint(-9, 9, values[:, ::5].shape, generator=generator) + 1) * (GRADIENT_UNIT / 2)
    return list(values)


def total(lanes: list[Tensor]) -> Tensor:
    found = None
    for lane in lanes:
        found = sum_with(found, lane)
    assert found is not None
    return found


def test_a_sum_of_lanes_has_the_same_bits_in_every_order_and_grouping(lanes):
    expected = total(lanes)
    for seed in range(5):
        order = random.Random(seed).sample(lanes, len(lanes))
        assert torch.equal(total(order), expected)
        assert torch.equal(total(order[:2]) + (total(order[2:3]) + total(order[3:])), expected)
    plain = [sum(order[1:], order[0]) for order in (lanes, lanes[::-1])]
    assert not torch.equal(*plain)  # in fp32 the order shows


def test_a_sum_of_lanes_is_at_most_half_a_unit_a_lane_from_the_exact_one(lanes):
    exact = torch.stack(lanes).double().sum(0)
    assert (total(lanes) - exact).abs().max() <= len(lanes) * GRADIENT_UNIT / 2
    of_normal_size = exact.abs() > 1e-6
    assert torch.allclose(total(lanes)[of_normal_size], exact[of_normal_size], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_in_sum_and_norm(lanes, value):
    lanes[2][3] = value
    assert not torch.isfinite(total(lanes)[3])
    assert torch.isfinite(total(lanes)[4])
    assert not torch.isfinite(norm_of([total(lanes).float()]))


def test_a_norm_has_the_same_bits_in_every_cut_and_is_that_of_the_elements(lanes):
    gradient = total(lanes).float()
    expected = norm_of([gradient])
    assert float(expected) == pytest.approx(float(gradient.double().norm()), rel=1e-9)
    for size in (1000, 4099, SIZE // 2):
        parts = list(gradient.split(size))
        assert torch.equal(norm_of(parts[::-1]), expected)
        of_ranks = sums_of_squares(parts[1:]) + sums_of_squares(parts[:1])
        assert torch.equal(of_ranks.sum().sqrt(), expected)


def _updated(weights: Tensor, gradients: Tensor, size: int, fused: bool) -> Tensor:
    """The weights after three updates of parts of so many elements."""
    parts = [torch.nn.Parameter(part.clone()) for part in weights.split(size)]
    optimizer = build_optimizer(OptimizerConfig(), parts, lambda alike: [alike], fused, {})
    optimizer.param_groups[0]["lr"] = 0.01
    for number in range(3):
        for part, gradient in zip(parts, gradients[number].split(size), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


def test_an_update_that_is_not_fused_has_the_same_bits_in_every_cut():
    generator = torch.Generator().manual_seed(2)
    weights, gradients = torch.randn(1003, generator=generator), torch.randn(3, 1003, generator=generator)
    for size in (1, 7, 100):
        assert torch.equal(_updated(weights, gradients, size, False), _updated(weights, gradients, 1003, False))
    assert torch.allclose(_updated(weights, gradients, 7, False), _updated(weights, gradients, 7, True), atol=1e-6)
