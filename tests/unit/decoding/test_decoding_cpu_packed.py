"""The packed twin of a model gives the model's numbers, for every kind of model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_transformer.decoding.cpu_packed import PackedLinear, packed_for_decoding
from dist_transformer.model.transformer import Transformer

MakeModel = Callable[..., Transformer]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": "pre", "activation": "swiglu", "norm_type": "rms", "positions": "rotary"},
    {"norm": "deepnorm", "activation": "gelu", "output_bias": True, "num_heads": 3, "key_size": 6, "value_size": 7},
]


@pytest.mark.parametrize("small_product", [0, 600, 2**24])
@pytest.mark.parametrize("given", VARIANTS, ids=str)
@torch.no_grad()
def test_a_packed_model_is_the_model(
    given: dict[str, Any], small_product: int, make_random_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dist_transformer.decoding.cpu_packed.SMALL_PRODUCT", dict.fromkeys([True, False], small_product)
    )
    model = make_random_model(300, **given).float()
    if model.output_bias is not None:
        torch.nn.init.normal_(model.output_bias)
    twin = packed_for_decoding(model)
    assert any(isinstance(module, PackedLinear) for module in twin.modules())
    source = torch.tensor([[5, 6, 2], [7, 2, 0]])
    target = torch.tensor([[1, 8, 9, 10], [1, 11, 12, 0]])
    torch.testing.assert_close(twin(source, target), model(source, target), rtol=1e-4, atol=1e-4)
    for rows in (slice(0, 2), slice(0, 1)):
        cache = twin.start_decoding(twin.encode(source[rows]), source[rows])
        for column in range(2):
            expected = model(source[rows], target[rows, : column + 1])[:, -1]
            torch.testing.assert_close(twin.decode_step(target[rows, column], cache), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 17, 33])
def test_a_product_of_any_number_of_rows_has_that_many(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_transformer.decoding.cpu_packed.SMALL_PRODUCT", dict.fromkeys([True, False], 0))
    linear = torch.nn.Linear(8, 5)
    packed = PackedLinear(linear.weight, linear.bias)
    for shape in ((rows, 8), (1, rows, 8), (rows, 2, 8)):
        given = torch.randn(shape)
        torch.testing.assert_close(packed(given), linear(given).detach(), rtol=1e-4, atol=1e-4)


def test_the_model_stays_as_it_was_and_shares_its_embeddings(make_random_model: MakeModel) -> None:
    model = make_random_model(9).float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = packed_for_decoding(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert twin.source_embedding.weight is model.source_embedding.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_type_than_fp32_is_left_alone(dtype: torch.dtype, make_random_model: MakeModel) -> None:
    model = make_random_model(9).to(dtype)
    assert packed_for_decoding(model) is model
