"""What is computed in another way on CPUs, against torch's own: dropout, attention in 16-bit types, products in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.model import cpu_kernels
from dist_transformer.model.attention import KeyValue, attend
from dist_transformer.model.cpu_kernels import Linear, faster_products
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
    mask = torch.tensor([0.0] * 4 + [float("-inf")] * 2).expand(2, 1, 1, 6) if masked == "padding" else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = attend(
            parts[0], KeyValue(*parts[1:]), None if mask is None else mask.to(dtype), is_causal=masked == "causal"
        )
    wide = [part.detach().float().requires_grad_() for part in parts]
    theirs = F.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=masked == "causal")
    assert torch.equal(ours, theirs.to(dtype))
    ours.float().square().sum().backward()
    theirs.to(dtype).float().square().sum().backward()
    for mine, other in zip(parts, wide, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad.to(dtype))


@pytest.fixture
def asked_anew() -> Iterator[None]:
    cpu_kernels._onednn_is_faster.cache_clear()
    yield
    cpu_kernels._onednn_is_faster.cache_clear()


@pytest.mark.parametrize("shape", [(40, 32), (4, 10, 32), (2, 5, 4, 32), (0, 32)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_gives_torchs_values_and_gradients_in_fp32(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(7)
    ours = Linear(32, 48, bias=has_bias)
    theirs = nn.Linear(32, 48, bias=has_bias).double()
    theirs.load_state_dict(ours.state_dict())
    ours_in = torch.randn(shape).requires_grad_()
    theirs_in = ours_in.detach().double().requires_grad_()
    ours_out, theirs_out = ours(ours_in), theirs(theirs_in)
    weights = torch.randn(48, 48)  # a gradient that is no constant
    (ours_out @ weights).square().sum().backward()
    (theirs_out @ weights.double()).square().sum().backward()
    pairs = [(ours_out, theirs_out), (ours_in.grad, theirs_in.grad)]
    pairs += [(mine.grad, other.grad) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_only_what_is_trained_has_a_gradient() -> None:
    linear, inputs = Linear(32, 48), torch.randn(40, 32)
    linear.weight.requires_grad_(False)
    linear(inputs).sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(linear.bias.grad, torch.full((48,), 40.0))
    with torch.no_grad():
        assert not linear(inputs).requires_grad


def test_autocast_multiplies_in_its_own_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(32, 48)(torch.randn(40, 32)).dtype == torch.bfloat16


def test_torchs_setting_is_what_it_was_after_a_product_and_after_an_error() -> None:
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    matrix = torch.rand(40, 32)
    with faster_products(matrix):
        assert (setting.fp32_precision == "bf16") == cpu_kernels.has_faster_products(matrix)
    assert setting.fp32_precision == before
    with pytest.raises(RuntimeError), faster_products(matrix):
        matrix @ matrix
    assert setting.fp32_precision == before
    Linear(32, 48)(torch.randn(40, 32)).sum().backward()
    assert setting.fp32_precision == before


@pytest.mark.usefixtures("asked_anew")
def test_products_that_are_not_in_fp32_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with tiles for bf16."""

    @contextmanager
    def in_bf16() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16):
            yield

    monkeypatch.setattr(cpu_kernels, "_by_onednn", in_bf16)
    monkeypatch.setattr(cpu_kernels, "_is_amd", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not cpu_kernels.has_faster_products(torch.ones(2))


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("manufacturer", ["GenuineIntel", None])
def test_mkl_is_left_alone_on_other_processors(
    manufacturer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if manufacturer:
        file.write_text(f"vendor_id : {manufacturer}\n")
    monkeypatch.setattr(cpu_kernels, "PROCESSORS", file)
    assert not cpu_kernels.has_faster_products(torch.ones(2))
