"""Import of weights of `torch.nn.Transformer`, with embeddings and output as in PyTorch's translation tutorial.

A state dict contains neither the number of heads, nor the position of the norms, nor the activation: the caller passes
them. Embeddings are assumed to be multiplied by sqrt(d_model), and positions to be the paper's sinusoids (3.4, 3.5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.interop.foreign_weights import UNREACHABLE, Rows, filled, read_tensors
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.model.layers import sinusoids

FIRST = "encoder.layers.0.self_attn.in_proj_weight"
ENCODER_LAYER = {
    "self_attention.query_key_value.weight": "self_attn.in_proj_weight",
    "self_attention.query_key_value.bias": "self_attn.in_proj_bias",
    "self_attention.output": "self_attn.out_proj",
    "self_attention_residual.norm": "norm1",
    "feed_forward.inner": "linear1",
    "feed_forward.outer": "linear2",
    "feed_forward_residual.norm": "norm2",
}
DECODER_LAYER = {
    **ENCODER_LAYER,
    "cross_attention.output": "multihead_attn.out_proj",
    "cross_attention_residual.norm": "norm2",
    "feed_forward_residual.norm": "norm3",
}
"""torch's modules or parameters by ours; the input projections of the cross-attention are converted separately."""


@dataclass(frozen=True)
class TorchModel:
    """Settings that a state dict does not contain, and the names of embeddings and output in it."""

    num_heads: int
    norm: Literal["post", "pre"] = "post"
    activation: Literal["relu", "gelu"] = "relu"
    source_embedding: str = "src_tok_emb.embedding"
    target_embedding: str = "tgt_tok_emb.embedding"
    output: str = "generator"


def import_torch(
    source: Path, out: Path, described: TorchModel, files: TokenizerFiles, languages: tuple[str, str] = ("", "")
) -> None:
    """Converts a state dict, as safetensors or from `torch.save(model.state_dict(), ...)`, to a model folder.

    Raises:
        CheckpointError: the file is damaged, or holds unexpected tensors.
        UserError: the sizes do not fit each other or the tokenizers.
    """
    tensors = _Tensors(read_tensors(source), source)
    tokenizer = Tokenizer.load(files.source, files.target)
    config, weights = _converted(tensors, described, tokenizer)
    tensors.refuse_others(config.d_model)
    information = ModelInformation(
        source_vocabulary=tokenizer.source_vocabulary,
        target_vocabulary=tokenizer.target_vocabulary,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        source_language=languages[0],
        target_language=languages[1],
        step=0,
    )
    save_model_folder(out, weights, config, files, information)


class _Tensors:
    """The state dict; records which tensors were taken."""

    def __init__(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        is_wrapped = all(name.startswith("module.") for name in tensors)  # by DataParallel
        self.tensors = {name.removeprefix("module." if is_wrapped else ""): tensor for name, tensor in tensors.items()}
        self.source = source
        self.left = set(self.tensors)
        firsts = [name for name in self.tensors if name.endswith(FIRST)]
        if len(firsts) != 1:
            raise CheckpointError(
                f"{source}: {len(firsts)} tensors are called {FIRST}, expected one, of one torch.nn.Transformer"
            )
        self.prefix = firsts[0].removesuffix(FIRST)

    def take(self, name: str) -> Tensor:
        if name not in self.tensors:
            around = [f"{key} {tuple(x.shape)}" for key, x in self.tensors.items() if not key.startswith(self.prefix)]
            raise CheckpointError(
                f"{self.source}: no tensor {name}. Outside of the Transformer it holds: {', '.join(around) or 'nothing'}; say "
                "which are the embeddings and the output"
            )
        self.left.discard(name)
        return self.tensors[name].float()

    def num_layers(self, stack: str) -> int:
        start = f"{self.prefix}{stack}.layers."
        return len({name.removeprefix(start).split(".")[0] for name in self.tensors if name.startswith(start)})

    def refuse_others(self, d_model: int) -> None:
        """Raises CheckpointError for tensors not taken, except sinusoids, which many models keep in a buffer."""
        for name in sorted(self.left):
            table = self.tensors[name].float().squeeze()
            is_table = table.ndim == 2 and table.shape[1] == d_model
            if not (is_table and torch.allclose(table, sinusoids(*table.shape), rtol=0, atol=2e-3)):
                raise CheckpointError(
                    f"{self.source}: holds {name} {tuple(table.shape)}, which has no place here: expected a "
                    "torch.nn.Transformer, two embeddings, an output and, at most, the sinusoids of the paper (3.5)"
                )


def _converted(tensors: _Tensors, described: TorchModel, tokenizer: Tokenizer) -> tuple[ModelConfig, dict[str, Tensor]]:
    weights = _layers(tensors)
    source_VD = tensors.take(f"{described.source_embedding}.weight")
    target_VD = tensors.take(f"{described.target_embedding}.weight")
    output_VD = tensors.take(f"{described.output}.weight")
    source, target = (
        Rows(len(matrix), 0, rows, 0)
        for matrix, rows in (
            (source_VD, _checked_rows(source_VD, tokenizer.source_vocabulary, "source")),
            (target_VD, _checked_rows(target_VD, tokenizer.target_vocabulary, "target")),
        )
    )
    bias_name = f"{described.output}.bias"
    bias_V = tensors.take(bias_name) if bias_name in tensors.tensors else torch.zeros(len(target_VD))
    is_tied = torch.equal(output_VD, target_VD)
    is_shared = is_tied and torch.equal(source_VD, target_VD)
    weights["source_embedding.weight"] = filled(source_VD, source, 0.0)
    if not is_shared:
        weights["target_embedding.weight"] = filled(target_VD, target, 0.0)
    if not is_tied:
        weights["output.weight"] = filled(output_VD, target, 0.0)
    weights["output_bias"] = filled(bias_V, target, UNREACHABLE)
    inner = weights["encoder_layers.0.feed_forward.inner.weight"]
    config = ModelConfig(
        d_model=source_VD.shape[1],
        d_ff=len(inner),
        num_heads=described.num_heads,
        num_encoder_layers=tensors.num_layers("encoder"),
        num_decoder_layers=tensors.num_layers("decoder"),
        norm=described.norm,
        final_norm="encoder_norm.weight" in weights,
        activation=described.activation,
        shared_embeddings=is_shared,
        tied_output=is_tied,
        output_bias=True,
    )
    if config.d_model % config.num_heads:
        raise UserError(
            f"{tensors.source}: {config.num_heads} heads do not divide d_model {config.d_model}; give another number"
        )
    return config, weights


def _layers(tensors: _Tensors) -> dict[str, Tensor]:
    weights = {}
    for stack, names in (("encoder", ENCODER_LAYER), ("decoder", DECODER_LAYER)):
        for number in range(tensors.num_layers(stack)):
            theirs, ours = f"{tensors.prefix}{stack}.layers.{number}", f"{stack}_layers.{number}"
            for name, source in names.items():
                for kind in ("",) if name.endswith((".weight", ".bias")) else (".weight", ".bias"):
                    weights[f"{ours}.{name}{kind}"] = tensors.take(f"{theirs}.{source}{kind}")
            if stack == "decoder":
                for kind in ("weight", "bias"):
                    packed = tensors.take(f"{theirs}.multihead_attn.in_proj_{kind}")
                    query, key, value = packed.chunk(3)
                    weights[f"{ours}.cross_attention.query.{kind}"] = query
                    weights[f"{ours}.cross_attention.key_value.{kind}"] = torch.cat([key, value])
        if f"{tensors.prefix}{stack}.norm.weight" in tensors.tensors:
            for kind in ("weight", "bias"):
                weights[f"{stack}_norm.{kind}"] = tensors.take(f"{tensors.prefix}{stack}.norm.{kind}")
    return weights


def _checked_rows(matrix: Tensor, rows: int, side: str) -> int:
    """Returns `rows`, the tokenizer's pieces rounded up to a multiple of 8. Raises UserError if the matrix differs."""
    if not rows - 8 < len(matrix) <= rows:
        raise UserError(
            f"the {side} embedding has {len(matrix)} rows, but the {side} tokenizer about {rows} pieces: expected a row a "
            "piece, in the order of its ids; give the sentencepiece model that the weights were trained with"
        )
    return rows
