"""Import of encoder-decoder models of Eole: docs/interop.md.

What Eole computes was read from eole/encoders, decoders and modules, version 0.6.4; biases that a model lacks are zero here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.tokenizer.model_file import ending_with_padding, read_pieces_file
from dist_transformer.errors import CheckpointError, DataError, UserError
from dist_transformer.interop.foreign_weights import UNREACHABLE, Rows, filled, read_tensors
from dist_transformer.interop.marian import model_of, save_imported
from dist_transformer.interop.marian_vocabulary import numbered_pieces, read_object, renumber, special_pieces
from dist_transformer.interop.marian_weights import layer_tensors

CONFIG, VOCABULARY, WEIGHTS = "config.json", "vocab.json", "model.00.safetensors"
ACTIVATIONS = ("relu", "gelu", "silu")
_ALLOWED: dict[str, list[Any]] = {
    **{name: ["transformer"] for name in ("architecture", "encoder_type", "decoder_type")},
    "encoder_layer_style": ["standard"],
    "position_encoding_type": ["SinusoidalInterleaved"],
    "mlp_activation_fn": list(ACTIVATIONS),
    "layer_norm": ["standard", "standardFP32"],
    "norm_eps": [1e-5],
    "generator_function": ["softmax"],
    **{name: [True] for name in ("final_encoder_layer_norm", "with_cross_attn")},
    **{name: [None] for name in ("heads_kv", "head_dim", "attn_scaling", "layer_types")},
    **{name: [0] for name in ("sliding_window", "num_experts", "relative_positions_buckets", "num_mtp_heads")},
    **{name: [False] for name in ("parallel_residual", "ffn_layernorm", "query_norm", "key_norm", "value_norm")},
    **{name: [False] for name in ("q_gating", "coverage_attn")},
}
"""The values of settings that have a counterpart here; the first is that of a file that lacks the setting."""
_OF_BOTH = {"hidden_size": "d_model", "transformer_ff": "d_ff", "heads": "num_heads", "mlp_activation_fn": "activation"}
"""Our names of the settings that have one value here, for encoder and decoder."""
_MISSING: dict[str, Any] = {"hidden_size": 512, "transformer_ff": 2048, "heads": 8, "layers": 2}
_MISSING |= {"mlp_activation_fn": ACTIVATIONS[0]}
_PLACES = {
    **{"encoder_attn": "context_attn", "self_attn_layer_norm": "input_layernorm", "q_proj": "linear_query"},
    **{"k_proj": "linear_keys", "v_proj": "linear_values", "out_proj": "final_linear", "fc1": "mlp.gate_up_proj"},
    **{"fc2": "mlp.down_proj", "final_layer_norm": "post_attention_layernorm", "layers": "transformer_layers"},
    "encoder_attn_layer_norm": "precontext_layernorm",
}
"""Eole's name of a part of a layer, by that of Hugging Face's MarianMTModel, if it is another."""


def import_eole(source: Path, out: Path) -> None:
    """Converts the folder of a checkpoint to a model folder with the same logits. Raises the errors of `import_marian`."""
    settings = read_object(source / CONFIG)
    config = _config_of(settings, source / CONFIG)
    vocabulary = read_object(source / VOCABULARY)
    pieces = [_pieces(vocabulary.get(side), source / VOCABULARY) for side in ("src", "tgt")]
    ids, unknown = _special(vocabulary, pieces[1], source / VOCABULARY)
    special = special_pieces(pieces, unknown, ids, source)
    protos = [read_pieces_file(path) for path in _subword_models(settings, source)]
    sides = renumber(protos, pieces, special, config.shared_embeddings)
    weights = _from_eole(read_tensors(source / WEIGHTS), config, sides[0][1], sides[1][1])
    sides[0] = (ending_with_padding(sides[0][0]), sides[0][1])
    save_imported(out, weights, config, sides, ids, ("", ""), "imported from Eole")


def _config_of(settings: Mapping[str, Any], path: Path) -> ModelConfig:
    """Our configuration of the same network. UserError: all settings without a counterpart, together."""
    common = _section(settings, "model", path)
    encoder, decoder = ({**common, **_section(common, side, path)} for side in ("encoder", "decoder"))
    problems = [
        f"model.{side}.{name}: expected {' or '.join(map(str, values))}, got {section[name]}"
        for side, section in (("encoder", encoder), ("decoder", decoder))
        for name, values in _ALLOWED.items()
        if section.get(name, values[0]) not in values
    ]
    theirs = [{name: side.get(name, missing) for name, missing in _MISSING.items()} for side in (encoder, decoder)]
    for name in _OF_BOTH:
        if theirs[0][name] != theirs[1][name]:
            problems.append(f"model.{name}: expected one value, got {theirs[0][name]} and {theirs[1][name]}")
    is_shared, is_tied = (bool(common.get(name)) for name in ("share_embeddings", "share_decoder_embeddings"))
    given: dict[str, Any] = {ours: theirs[0][name] for name, ours in _OF_BOTH.items()}
    given |= {f"num_{side}_layers": each["layers"] for side, each in zip(("encoder", "decoder"), theirs, strict=True)}
    given |= {"norm": "pre", "shared_embeddings": is_shared and is_tied, "tied_output": is_tied, "output_bias": True}
    advice = "Give an encoder-decoder Transformer with sinusoidal positions, as Eole's recipe wmt17 trains it"
    return model_of(given, problems, path, advice)


def _section(settings: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise DataError(f"{path}: {name} is {section!r}, expected names with values. Copy it again.")
    return section


def _pieces(listed: Any, path: Path) -> list[str]:
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise DataError(f"{path}: expected src and tgt, a list of pieces each. Copy it again.")
    return numbered_pieces({text: number for number, text in enumerate(listed)}, path, len(listed))


def _special(vocabulary: Mapping[str, Any], target: list[str], path: Path) -> tuple[SpecialTokens, str]:
    names = {"unk_token": "<unk>", "pad_token": "<blank>", "bos_token": "<s>", "eos_token": "</s>"}
    names |= {name: str(text) for name, text in _section(vocabulary, "specials", path).items() if name in names}
    names["bos_token"] = str(vocabulary.get("decoder_start_token") or names["bos_token"])
    for name, text in names.items():
        if text not in target:
            raise DataError(f"{path}: no piece {text!r} ({name}) of the target, expected one. Copy it again.")
    number = {name: target.index(text) for name, text in names.items()}
    return SpecialTokens(number["bos_token"], number["eos_token"], number["pad_token"]), names["unk_token"]


def _subword_models(settings: Mapping[str, Any], source: Path) -> list[Path]:
    """The sentencepiece models of the source and of the target, which lie beside config.json."""
    path = source / CONFIG
    names = _section(_section(settings, "transforms_configs", path), "sentencepiece", path)
    first = names.get("src_subword_model")
    if "sentencepiece" not in (settings.get("transforms") or []) or not isinstance(first, str):
        raise UserError(
            f"{path}: cut by {settings.get('transforms')}, expected the transform sentencepiece with a src_subword_model; "
            "other tokenizers have no counterpart here"
        )
    return [source / Path(name).name for name in (first, str(names.get("tgt_subword_model") or first))]


def _from_eole(left: dict[str, Tensor], config: ModelConfig, source: Rows, target: Rows) -> dict[str, Tensor]:
    """Our weights. CheckpointError names tensors that are missing, of another shape, or without a place."""
    for name, tensor in [*left.items()]:
        if "transformer_layers" in name and tensor.ndim == 2:
            left.setdefault(name.replace("weight", "bias"), tensor.new_zeros(len(tensor)))
    weights = {}
    try:
        for ours, names, _ in layer_tensors(config):
            weights[ours] = torch.cat([left.pop(_name_of(name)) for name in names])
        for side in ("encoder", "decoder"):
            weights |= {f"{side}_norm.{kind}": left.pop(f"{side}.layer_norm.{kind}") for kind in ("weight", "bias")}
        source_VD = left.pop("src_emb.embeddings.weight")
        target_VD = left.pop("tgt_emb.embeddings.weight", source_VD)
        output_VD = left.pop("generator.weight", target_VD)
        bias_V = left.pop("generator.bias", output_VD.new_zeros(len(output_VD)))
        weights["output_bias"] = filled(bias_V, target, UNREACHABLE)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{WEIGHTS}: lacks a tensor that {CONFIG} tells, or its shape ({error})") from error
    weights["source_embedding.weight"] = filled(source_VD, source, 0.0)
    if not config.shared_embeddings:
        weights["target_embedding.weight"] = filled(target_VD, target, 0.0)
    if not config.tied_output:
        weights["output.weight"] = filled(output_VD, target, 0.0)
    if unknown := sorted(name for name in left if not name.endswith((".pe.pe", ".layer_scalar"))):
        raise CheckpointError(f"{WEIGHTS}: {len(unknown)} tensors have no place here: {', '.join(unknown[:5])}")
    return {name: tensor.float() for name, tensor in weights.items()}


def _name_of(name: str) -> str:
    """Eole's name of the tensor that a MarianMTModel calls `name`."""
    return ".".join(_PLACES.get(word, word) for word in name.removeprefix("model.").split("."))
