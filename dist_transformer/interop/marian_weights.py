"""Conversion of weights between this package's Transformer and Hugging Face's MarianMTModel.

Names differ, Marian has queries, keys and values as three matrices, and its positions are all sines, then all cosines, so
that the axis of d_model is in another order: our entry 2i is Marian's i, our 2i + 1 Marian's d_model / 2 + i.

Axes: V vocabulary, D model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_transformer.config.schema import ModelConfig
from dist_transformer.errors import CheckpointError
from dist_transformer.interop.foreign_weights import UNREACHABLE, Rows, filled
from dist_transformer.model.layers import sinusoids

POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
"""Names of sinusoids, which older folders hold although they are no weights."""


@dataclass(frozen=True)
class _Module:
    """A linear layer or norm: our name, Marian's names (whose rows are concatenated), and the weight's axis of d_model."""

    ours: str
    theirs: tuple[str, ...]
    axis: int


_ENCODER = (
    _Module("self_attention.query_key_value", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 1),
    _Module("self_attention.output", ("self_attn.out_proj",), 0),
    _Module("self_attention_residual.norm", ("self_attn_layer_norm",), 0),
    _Module("feed_forward.inner", ("fc1",), 1),
    _Module("feed_forward.outer", ("fc2",), 0),
    _Module("feed_forward_residual.norm", ("final_layer_norm",), 0),
)
_DECODER = (
    *_ENCODER,
    _Module("cross_attention.query", ("encoder_attn.q_proj",), 1),
    _Module("cross_attention.key_value", ("encoder_attn.k_proj", "encoder_attn.v_proj"), 1),
    _Module("cross_attention.output", ("encoder_attn.out_proj",), 0),
    _Module("cross_attention_residual.norm", ("encoder_attn_layer_norm",), 0),
)


def from_marian(tensors: Mapping[str, Tensor], config: ModelConfig, source: Rows, target: Rows) -> dict[str, Tensor]:
    """Our weights, fp32, from those of a MarianMTModel. CheckpointError names missing and unexpected tensors."""
    order_D = _order(config.d_model)
    for name in (name for name in POSITIONS if name in tensors):
        found_TD = _reordered(tensors[name], (1,), order_D).float()
        if not torch.allclose(found_TD, sinusoids(*found_TD.shape), rtol=0, atol=2e-3):  # may have been rounded to fp16
            raise CheckpointError(f"the Marian weights hold {name} that are no sinusoids, as in the paper (3.5)")
    left = {name: tensor for name, tensor in tensors.items() if name not in POSITIONS}
    weights = {}
    for name, theirs, axes in layer_tensors(config):
        weights[name] = _reordered(torch.cat([_take(left, (key,)) for key in theirs]), axes, order_D)
    if config.shared_embeddings:
        shared_names = ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
        source_VD = target_VD = _take(left, (*shared_names, "lm_head.weight"))
    else:
        source_VD = _take(left, ("model.encoder.embed_tokens.weight", "model.shared.weight"))
        target_VD = _take(left, ("model.decoder.embed_tokens.weight", "model.shared.weight"))
        weights["target_embedding.weight"] = filled(_reordered(target_VD, (1,), order_D), target, 0.0)
    weights["source_embedding.weight"] = filled(_reordered(source_VD, (1,), order_D), source, 0.0)
    if not config.tied_output:
        weights["output.weight"] = filled(_reordered(_take(left, ("lm_head.weight",)), (1,), order_D), target, 0.0)
    bias_1V = left.pop("final_logits_bias", torch.zeros(1, target.imported))
    weights["output_bias"] = filled(bias_1V.view(-1), target, UNREACHABLE)
    tied = ("lm_head.", "model.shared.", "model.encoder.embed_tokens.", "model.decoder.embed_tokens.")
    taken = {name for _, theirs, _ in layer_tensors(config) for name in theirs}
    if unknown := sorted(name for name in left if not name.startswith(tied) and name not in taken):
        raise CheckpointError(
            f"the Marian weights hold {len(unknown)} tensors that this model has no place for: {', '.join(unknown[:5])}. "
            "Expected those of a MarianMTModel of the sizes in its config.json"
        )
    return {name: tensor.float() for name, tensor in weights.items()}


def to_marian(
    weights: Mapping[str, Tensor], config: ModelConfig, num_source: int, num_target: int
) -> dict[str, Tensor]:
    """The tensors of a MarianMTModel, tied ones once, with `num_source` and `num_target` rows of the vocabularies."""
    order_D = _order(config.d_model).argsort()
    tensors = {}
    for name, theirs, axes in layer_tensors(config):
        tensors.update(dict(zip(theirs, _reordered(weights[name], axes, order_D).chunk(len(theirs)), strict=True)))
    source_VD = weights["source_embedding.weight"][:num_source, order_D]
    if config.shared_embeddings:
        tensors["model.shared.weight"] = source_VD
    else:
        tensors["model.encoder.embed_tokens.weight"] = source_VD
        tensors["model.decoder.embed_tokens.weight"] = weights["target_embedding.weight"][:num_target, order_D]
    if not config.tied_output:
        tensors["lm_head.weight"] = weights["output.weight"][:num_target, order_D]
    bias_V = weights["output_bias"] if config.output_bias else torch.zeros(num_target)
    tensors["final_logits_bias"] = bias_V[:num_target].view(1, -1)
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def _order(d_model: int) -> Tensor:
    """Marian's index of each of our entries of the axis of d_model."""
    place_D = torch.arange(d_model)
    return place_D // 2 + place_D % 2 * (d_model // 2)


def layer_tensors(config: ModelConfig) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yields (our name, Marian's names, the axes of d_model) of every tensor of the layers."""
    stacks: Sequence[tuple[str, int, Sequence[_Module]]] = (
        ("encoder", config.num_encoder_layers, _ENCODER),
        ("decoder", config.num_decoder_layers, _DECODER),
    )
    for stack, num_layers, modules in stacks:
        for number in range(num_layers):
            for module in modules:
                theirs = [f"model.{stack}.layers.{number}.{name}" for name in module.theirs]
                ours = f"{stack}_layers.{number}.{module.ours}"
                yield f"{ours}.weight", [f"{name}.weight" for name in theirs], (module.axis,)
                yield f"{ours}.bias", [f"{name}.bias" for name in theirs], (0,) if module.axis == 0 else ()


def _reordered(tensor: Tensor, axes: Sequence[int], order_D: Tensor) -> Tensor:
    for axis in axes:
        if axis >= tensor.ndim or tensor.shape[axis] != len(order_D):
            raise CheckpointError(
                f"the Marian weights hold a tensor of {tuple(tensor.shape)}, where axis {axis} should have d_model = "
                f"{len(order_D)} entries: expected weights of the sizes in config.json; copy both again"
            )
        tensor = tensor.index_select(axis, order_D)
    return tensor


def _take(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise CheckpointError(f"the Marian weights lack {names[0]}: expected a complete MarianMTModel; copy them again")
