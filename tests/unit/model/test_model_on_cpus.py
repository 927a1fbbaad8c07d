"""What is computed in another way on CPUs, against torch's own: dropout, and attention in 16-bit types."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dist_transformer.model.attention import KeysValues, attend
from dist_transformer.model.layers import Dropout


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_dropout_zeroes_with_the_probability_and_keeps_the_mean(probability: float) -> None:
    torch.manual_seed(1)
    dropped = Dropout(probability)(torch.ones(1000, 1003))
    deviation = (probability * (1 - probability) / dropped.numel()) ** 0.5
    assert abs((dropped == 0).double().mean() - probability) < 5 * deviation + 1 / 65_536
    torch.testing.assert_close(dropped[dropped != 0].unique(), torch.tensor([1 / (1 - probability)]), rtol=1e-4, atol=0)


def test_elements_are_dropped_independently_of_their_neighbours() -> None:
    """Four masks come from one random number."""
    torch.manual_seed(2)
    is_kept = Dropout(0.3)(torch.ones(250_000, 4)) != 0
    patterns = (is_kept * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16) / len(is_kept)
    kept = torch.tensor([bin(pattern).count("1") for pattern in range(16)])
    torch.testing.assert_close(patterns, 0.7**kept * 0.3 ** (4 - kept), rtol=0, atol=0.003)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (2, 0, 4), (1,)])
def test_the_gradient_passes_where_the_input_did(shape: tuple[int, ...]) -> None:
    inputs = torch.rand(shape).add(1).requires_grad_()
    dropped = Dropout(0.5)(inputs)
    (gradient,) = torch.autograd.grad(dropped.sum(), inputs)
    torch.testing.assert_close(gradient * inputs, dropped)


def test_dropout_follows_torchs_seed_and_the_probability_s_ends_are_exact() -> None:
    def drop(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Dropout(0.3)(torch.ones(100))

    assert torch.equal(drop(3), drop(3))
    assert not torch.equal(drop(3), drop(4))
    inputs = torch.ones(1000)
    assert Dropout(0.0)(inputs) is inputs
    assert Dropout(0.3).eval()(inputs) is inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", ["not", "padding", "causal"])
@pytest.mark.parametrize("autocast", [True, False])
def test_attention_in_16_bits_is_that_of_its_inputs_in_fp32(dtype: torch.dtype, masked: str, autocast: bool) -> None:
    torch.manual_seed(5)
    parts = [torch.randn(2, 3, 6, 8).to(dtype).requires_grad_() for _ in range(3)]
    mask = torch.tensor([True] * 4 + [False] * 2).expand(2, 1, 1, 6) if masked == "padding" else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = attend(parts[0], KeysValues(*parts[1:]), mask, is_causal=masked == "causal")
    wide = [part.detach().float().requires_grad_() for part in parts]
    theirs = F.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=masked == "causal")
    assert torch.equal(ours, theirs.to(dtype))
    ours.float().square().sum().backward()
    theirs.to(dtype).float().square().sum().backward()
    for mine, other in zip(parts, wide, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad.to(dtype))
