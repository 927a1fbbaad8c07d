"""Reader of config.json of a MarianMTModel: checks type and range of every entry that matters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import UserError
from dist_transformer.interop.marian_vocabulary import read_object

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
"""Our names by Marian's."""


@dataclass(frozen=True)
class MarianSettings:
    """Content of config.json.

    Attributes:
        config: the same model as our configuration.
        sizes: rows of Marian's matrices, the source's and the target's.
        is_shared: one vocabulary and one matrix for both languages.
    """

    config: ModelConfig
    ids: SpecialTokens
    sizes: tuple[int, int]
    is_shared: bool


def read_settings(path: Path) -> MarianSettings:
    """Reads config.json.

    Raises:
        DataError: the file is missing, or no JSON object.
        UserError: all entries that are missing, of the wrong type, or without a counterpart here, together.
    """
    entries = _Entries(read_object(path))
    ids = SpecialTokens(*(entries.whole(f"{name}_token_id", least=0) for name in ("decoder_start", "eos", "pad")))
    is_shared = entries.truth("share_encoder_decoder_embeddings", True)
    source = entries.whole("vocab_size")
    target = entries.whole("decoder_vocab_size", default=source)
    model = {**_sizes(entries), **_kinds(entries, is_shared)}
    _check(entries, model, ids)
    if entries.problems:
        raise UserError(
            f"{path}: cannot be imported:\n" + "\n".join(f"  {problem}" for problem in entries.problems) + "\n"
            "Give a folder of a MarianMTModel that Hugging Face's save_pretrained wrote, with its tokenizer"
        )
    return MarianSettings(ModelConfig(**model), ids, (source, source if is_shared else target), is_shared)


class _Entries:
    """Entries of the file, where null counts as missing; collects the problems."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = {name: value for name, value in content.items() if value is not None}
        self.problems: list[str] = []

    def whole(self, name: str, least: int = 1, default: int | None = None) -> int:
        value = self.content.get(name, default)
        if type(value) is int and value >= least:
            return value
        self._refuse(name, f"a whole number from {least} on")
        return least

    def share(self, name: str, default: float) -> float:
        value = self.content.get(name, default)
        if type(value) in (int, float) and 0 <= value < 1:
            return float(value)
        self._refuse(name, "a number from 0 to below 1")
        return default

    def truth(self, name: str, default: bool) -> bool:
        value = self.content.get(name, default)
        if type(value) is bool:
            return value
        self._refuse(name, "true or false")
        return default

    def of_both(self, name: str) -> int:
        """A size that must be the same in encoder and decoder."""
        num_problems = len(self.problems)
        encoders, decoders = self.whole(f"encoder_{name}"), self.whole(f"decoder_{name}")
        if encoders != decoders and len(self.problems) == num_problems:
            self.problems.append(f"encoder_{name} is {encoders} and decoder_{name} {decoders}, expected the same")
        return encoders

    def _refuse(self, name: str, expected: str) -> None:
        found = f"is {self.content[name]!r}" if name in self.content else "is missing"
        self.problems.append(f"{name} {found}, expected {expected}")


def _sizes(entries: _Entries) -> dict[str, Any]:
    return {
        "d_model": entries.whole("d_model"),
        "d_ff": entries.of_both("ffn_dim"),
        "num_heads": entries.of_both("attention_heads"),
        "num_encoder_layers": entries.whole("encoder_layers"),
        "num_decoder_layers": entries.whole("decoder_layers"),
        "dropout": entries.share("dropout", 0.1),
        "layer_drop": _layer_drop(entries),
    }


def _layer_drop(entries: _Entries) -> float:
    """LayerDrop of encoder and decoder, else 0: it matters in training only, so a difference is no reason to refuse."""
    of_encoder, of_decoder = (entries.share(f"{side}_layerdrop", 0.0) for side in ("encoder", "decoder"))
    return of_encoder if of_encoder == of_decoder else 0.0


def _kinds(entries: _Entries, is_shared: bool) -> dict[str, Any]:
    is_tied = entries.truth("tie_word_embeddings", True)
    activation = entries.content.get("activation_function", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        entries.problems.append(f"activation_function is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    return {
        "activation": ACTIVATIONS.get(str(activation)),
        "shared_embeddings": is_shared and is_tied,
        "tied_output": is_tied,
        "output_bias": True,
    }


def _check(entries: _Entries, model: Mapping[str, Any], ids: SpecialTokens) -> None:
    """Adds problems of valid entries that have no counterpart here."""
    if (model_type := entries.content.get("model_type")) != "marian":
        entries.problems.append(f"model_type is {model_type!r}, expected 'marian'")
    if not entries.truth("scale_embedding", False):
        entries.problems.append(
            "scale_embedding is false, expected true: embeddings are multiplied by sqrt(d_model) (3.4)"
        )
    if ids.bos == ids.eos and "decoder_start_token_id" in entries.content:
        entries.problems.append(
            "decoder_start_token_id is eos_token_id, expected two ids: a translation cannot begin with its end"
        )
    if (d_model := model["d_model"]) % 2:
        entries.problems.append(f"d_model is {d_model}, expected an even number: a sine and a cosine in turn (3.5)")
    if d_model % model["num_heads"]:
        entries.problems.append(f"encoder_attention_heads is {model['num_heads']}, expected a divisor of {d_model}")
