"""Folders as Eole writes them, made here with random weights, and what Eole computes from them, written out in fp64.

The formulas are those of eole/encoders, eole/decoders and eole/modules, version 0.6.4.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from marian_npz import marian_spm
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor

SIZES: dict[str, Any] = {"hidden_size": 8, "transformer_ff": 12, "heads": 2}
LAYERS = {"encoder": 2, "decoder": 1}
SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]


def make_eole_folder(folder: Path, **model: Any) -> None:
    """Writes config.json, vocab.json, weights and subword models. `model`: other settings of the section of that name."""
    folder.mkdir(parents=True)
    is_shared = bool(model.get("share_embeddings"))
    names = ["both.model"] * 2 if is_shared else ["en.model", "de.model"]
    pieces = []
    for seed, name in enumerate(names):
        (folder / name).write_bytes(marian_spm(0 if is_shared else seed))
        spm = SentencePieceProcessor(model_file=str(folder / name))
        # Eole may leave rare pieces out, here of the source, and fills up.
        left_out = 0 if is_shared or seed else 5
        kept = [spm.id_to_piece(number) for number in range(2, spm.get_piece_size() - left_out)]
        pieces.append([*SPECIALS, *kept, "averyunlikelytoken0"])
    whole = {"architecture": "transformer", "position_encoding_type": "SinusoidalInterleaved", **SIZES, **model}
    sides = {side: {**SIZES, "layers": layers, f"{side}_type": "transformer"} for side, layers in LAYERS.items()}
    models = {
        f"{side}_subword_model": f"${{MODEL_PATH}}/{name}" for side, name in zip(("src", "tgt"), names, strict=True)
    }
    config = {
        "transforms": ["sentencepiece"],
        "transforms_configs": {"sentencepiece": models},
        "model": {**whole, **sides},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = {"src": pieces[0], "tgt": pieces[1], "decoder_start_token": "<s>"}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    save_file(_random_weights(whole, *map(len, pieces)), folder / "model.00.safetensors")


def eole_log_probabilities(folder: Path, source: str, target: str) -> list[float]:
    """Returns the log-probability of each token of `target` and of its end, given `source` and the tokens before it."""
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.00.safetensors").items()}
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    models = [Path(name).name for name in settings["transforms_configs"]["sentencepiece"].values()]
    ids = []
    for side, text, name in zip(("src", "tgt"), (source, target), models, strict=True):
        number = {piece: index for index, piece in enumerate(vocabulary[side])}
        cut = SentencePieceProcessor(model_file=str(folder / name)).encode(text, out_type=str)
        ids.append([number.get(piece, number["<unk>"]) for piece in cut])
    source_VD = weights["src_emb.embeddings.weight"]
    target_VD = weights.get("tgt_emb.embeddings.weight", source_VD)
    activation = F.silu if settings["model"].get("mlp_activation_fn") == "silu" else F.relu

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def attention(x: Tensor, memory: Tensor, name: str, is_causal: bool) -> Tensor:
        inputs = (("query", x), ("keys", memory), ("values", memory))
        query, key, value = (
            linear(each, f"{name}.linear_{part}").unflatten(-1, (SIZES["heads"], -1)).transpose(0, 1)
            for part, each in inputs
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return linear(mixed.transpose(0, 1).flatten(1), f"{name}.final_linear")

    def stack(x: Tensor, side: str, memory: Tensor | None) -> Tensor:
        for layer in range(LAYERS[side]):
            name = f"{side}.transformer_layers.{layer}"
            inner = norm(x, f"{name}.input_layernorm")
            x = x + attention(inner, inner, f"{name}.self_attn", memory is not None)
            if memory is not None:
                inner = norm(x, f"{name}.precontext_layernorm")
                x = x + attention(inner, memory, f"{name}.context_attn", False)
            inner = activation(linear(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp.gate_up_proj"))
            x = x + linear(inner, f"{name}.mlp.down_proj")
        return norm(x, f"{side}.layer_norm")

    memory = stack(_embedded(source_VD, ids[0]), "encoder", None)
    hidden = stack(_embedded(target_VD, [SPECIALS.index("<s>"), *ids[1]]), "decoder", memory)
    logits = F.linear(hidden, weights.get("generator.weight", target_VD), weights["generator.bias"])
    wanted = torch.tensor([*ids[1], SPECIALS.index("</s>")])
    return logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def _embedded(matrix_VD: Tensor, ids: list[int]) -> Tensor:
    size = matrix_VD.shape[1]
    rate = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(len(ids), dtype=torch.float64)[:, None] * rate
    return matrix_VD[ids] * size**0.5 + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def _random_weights(model: dict[str, Any], num_source: int, num_target: int) -> dict[str, Tensor]:
    size, inner = SIZES["hidden_size"], SIZES["transformer_ff"]
    shapes: dict[str, tuple[int, ...]] = {"src_emb.embeddings.weight": (num_source, size)}
    if not model.get("share_embeddings"):
        shapes["tgt_emb.embeddings.weight"] = (num_target, size)
    if not model.get("share_decoder_embeddings"):
        shapes["generator.weight"] = (num_target, size)
    for side, layers in LAYERS.items():
        for layer in range(layers):
            name, is_decoder = f"{side}.transformer_layers.{layer}", side == "decoder"
            for part in ("self_attn", "context_attn")[: 1 + is_decoder]:
                for matrix in ("linear_query", "linear_keys", "linear_values", "final_linear"):
                    shapes[f"{name}.{part}.{matrix}.weight"] = (size, size)
                    if model.get("add_qkvbias"):
                        shapes[f"{name}.{part}.{matrix}.bias"] = (size,)
            shapes |= {f"{name}.mlp.gate_up_proj.weight": (inner, size), f"{name}.mlp.down_proj.weight": (size, inner)}
            if model.get("add_ffnbias"):
                shapes |= {f"{name}.mlp.gate_up_proj.bias": (inner,), f"{name}.mlp.down_proj.bias": (size,)}
            norms = ("input_layernorm", "post_attention_layernorm", "precontext_layernorm")[: 2 + is_decoder]
            shapes |= {f"{name}.{norm}.{kind}": (size,) for norm in norms for kind in ("weight", "bias")}
        shapes |= {f"{side}.layer_norm.{kind}": (size,) for kind in ("weight", "bias")}
    shapes["generator.bias"] = (num_target,)
    generator = torch.Generator().manual_seed(7)
    weights = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    buffers = {"src_emb.pe.pe": torch.zeros(9, 1, size), "decoder.transformer_layers.0.layer_scalar": torch.ones(1)}
    return weights | buffers
