"""A random model of a tiny language, and one whose next-token probabilities are known."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.layers import AddAndNorm, DecoderLayer
from dist_transformer.model.transformer import Transformer

PAD, BOS, EOS = 0, 1, 2


def tiny_model(vocabulary: int, **given: Any) -> Transformer:
    sizes: dict[str, Any] = dict(d_model=8, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=2)
    config = ModelConfig(**{**sizes, **given}, tied_output=False)
    return Transformer(config, vocabulary, vocabulary, PAD).eval()


@pytest.fixture
def make_random_model() -> Callable[..., Transformer]:
    """Random weights, scaled so that tokens differ in probability and the source matters; fp64 against rounding."""

    def make(vocabulary: int, seed: int = 6, **given: Any) -> Transformer:
        torch.manual_seed(seed)
        model = tiny_model(vocabulary, **given).double()
        with torch.no_grad():
            model.output_weight.mul_(3)
            for layer in model.decoder_layers:
                assert isinstance(layer, DecoderLayer)
                layer.cross_attention.output.weight.mul_(4)
        return model

    return make


@pytest.fixture
def make_unigram_model() -> Callable[[Sequence[float]], Transformer]:
    """The logits of the next token are those given, whatever the source and the tokens before."""

    def make(logits: Sequence[float]) -> Transformer:
        model = tiny_model(len(logits))
        last_layer = model.decoder_layers[-1]
        assert isinstance(last_layer, DecoderLayer)
        residual = last_layer.feed_forward_residual
        assert isinstance(residual, AddAndNorm)
        with torch.no_grad():
            nn.init.zeros_(residual.norm.weight)
            nn.init.zeros_(residual.norm.bias)[0] = 1.0
            model.output_weight[:, 0] = torch.tensor(logits)
        return model

    return make
