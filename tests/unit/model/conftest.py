"""Small models in float64, where equalities hold to the last digits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.transformer import Transformer

PAD = 0
VOCABULARY = 24


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(1)


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    def make(**given: Any) -> ModelConfig:
        sizes = dict(d_model=16, d_ff=40, num_heads=4, num_encoder_layers=2, num_decoder_layers=3, dropout=0.0)
        return ModelConfig(**{**sizes, **given})

    return make


@pytest.fixture
def make_model(make_config: Callable[..., ModelConfig]) -> Callable[..., Transformer]:
    """A model with random biases and gains, so that no parameter is at a value that hides a mistake."""

    def make(source_vocabulary: int = VOCABULARY, target_vocabulary: int = VOCABULARY, **given: Any) -> Transformer:
        model = Transformer(make_config(**given), source_vocabulary, target_vocabulary, PAD).double()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model

    return make


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(source, target input, target output), ragged: rows of 7, 4, 5 and of 6, 6, 3 tokens."""
    source, target_in, target_out = (torch.randint(3, VOCABULARY, (3, length)) for length in (7, 6, 6))
    source[1, 4:] = source[2, 5:] = PAD
    target_in[2, 3:] = target_out[2, 3:] = PAD
    return source, target_in, target_out
