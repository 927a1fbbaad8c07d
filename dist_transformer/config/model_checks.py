"""Checks between the settings of the model, its vocabularies and the search."""

from collections.abc import Iterator
from typing import Any


def check_model(model: Any) -> Iterator[str]:
    if model.d_model % model.num_heads and None in (model.key_size, model.value_size):
        yield (
            f"model.num_heads: {model.num_heads} heads do not divide d_model {model.d_model}; take another number, or give "
            "model.key_size and model.value_size"
        )
    if (model.positions == "learned") != (model.max_positions is not None):
        yield (
            f"model.max_positions: got {model.max_positions or 'none'} with model.positions {model.positions}: learned "
            "positions need it (data.filters.max_tokens is enough), the others have no longest sentence; set both or "
            "neither"
        )
    keys = model.key_size or model.d_model // model.num_heads
    if model.positions == "rotary" and keys % 2:
        yield (
            f"model.positions: rotary turns pairs: heads need keys of an even size, got {keys}; give an even "
            "model.key_size, another model.num_heads or other positions"
        )
    if model.d_model % 2 and model.positions == "sinusoidal":
        yield f"model.d_model: sinusoidal positions (3.5) need an even width, got {model.d_model}"
    if model.shared_embeddings and not model.tied_output:
        yield "model.tied_output: false needs model.shared_embeddings: false (3.4 shares all three matrices)"


def check_positions(data: Any, model: Any) -> Iterator[str]:
    if model.max_positions is not None and data.filters.max_tokens > model.max_positions:
        yield (
            f"model.max_positions: {model.max_positions} learned positions cannot take a sentence of "
            f"data.filters.max_tokens {data.filters.max_tokens}; raise the first or lower the second"
        )


def check_vocabulary(tokenizer: Any, model: Any) -> Iterator[str]:
    if model.shared_embeddings and not tokenizer.shared:
        yield "model.shared_embeddings: true needs tokenizer.shared: true; set both or neither"
    if tokenizer.target_model and not tokenizer.source_model:
        yield "tokenizer.target_model: is given without tokenizer.source_model; give both, or source_model alone"
    if tokenizer.source_model and not tokenizer.target_model and not tokenizer.shared:
        yield "tokenizer.source_model: separate vocabularies need both source_model and target_model, or neither"
