"""Reader of config.json of a MarianMTModel: checks type and range of every entry that matters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from dist_transformer.config.checks import check_model
from dist_transformer.config.loading import value_problem
from dist_transformer.config.schema import ModelConfig
from dist_transformer.config.section import Bool, Fraction, PositiveInt
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import UserError
from dist_transformer.interop.marian_vocabulary import read_object

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
"""Our names by Marian's."""

Id = Annotated[int, Field(ge=0, strict=True)]


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


class _Entries(BaseModel):
    """The entries that matter; those without a default must be given."""

    model_config = ConfigDict(protected_namespaces=())

    model_type: Literal["marian"]
    scale_embedding: Literal[True]  # embeddings are multiplied by sqrt(d_model) (3.4)
    d_model: Annotated[PositiveInt, Field(multiple_of=2)]  # a sine and a cosine in turn (3.5)
    vocab_size: PositiveInt
    decoder_vocab_size: PositiveInt | None = None
    encoder_layers: PositiveInt
    decoder_layers: PositiveInt
    encoder_ffn_dim: PositiveInt
    decoder_ffn_dim: PositiveInt
    encoder_attention_heads: PositiveInt
    decoder_attention_heads: PositiveInt
    activation_function: Literal["relu", "gelu", "swish", "silu"] = "gelu"
    dropout: Fraction = 0.1
    encoder_layerdrop: Fraction = 0.0
    decoder_layerdrop: Fraction = 0.0
    share_encoder_decoder_embeddings: Bool = True
    tie_word_embeddings: Bool = True
    decoder_start_token_id: Id
    eos_token_id: Id
    pad_token_id: Id

    @field_validator("decoder_ffn_dim", "decoder_attention_heads", "encoder_attention_heads", "eos_token_id")
    @classmethod
    def _fits_the_others(cls, value: int, info: ValidationInfo) -> int:
        name, others = str(info.field_name), info.data
        if value != others.get(name.replace("decoder_", "encoder_"), value):
            raise PydanticCustomError("differs", "expected the same as in the encoder")
        if name == "encoder_attention_heads" and others.get("d_model", 0) % value:
            raise PydanticCustomError("heads", "expected a divisor of d_model")
        if name == "eos_token_id" and value == others.get("decoder_start_token_id"):
            raise PydanticCustomError("start", "expected another id than decoder_start_token_id")
        return value


def model_of(given: Mapping[str, Any], problems: Sequence[str], path: Path, advice: str) -> ModelConfig:
    """Our configuration of the network described in `path`. UserError: all its problems, after those found before."""
    try:
        config = ModelConfig.model_validate(given)
        found = list(check_model(config))
    except ValidationError as error:
        found = [f"{each['loc'][0]}: {value_problem((), each)}" for each in error.errors()]
    if found := list(dict.fromkeys([*problems, *found])):
        raise UserError("\n  ".join([f"{path}: cannot be imported:", *found]) + f"\n{advice}")
    return config


def read_settings(path: Path) -> MarianSettings:
    """Reads config.json, where null counts as missing.

    Raises:
        DataError: the file is missing, or no JSON object.
        UserError: all entries that are missing, of the wrong type, or without a counterpart here, together.
    """
    try:
        found = _Entries(**{name: value for name, value in read_object(path).items() if value is not None})
    except ValidationError as error:
        problems = [
            f"  {each['loc'][0]}: {'is missing' if each['type'] == 'missing' else value_problem((), each)}"
            for each in error.errors()
        ]
        raise UserError(
            f"{path}: cannot be imported:\n" + "\n".join(problems) + "\n"
            "Give a folder of a MarianMTModel that Hugging Face's save_pretrained wrote, with its tokenizer"
        ) from None
    is_shared = found.share_encoder_decoder_embeddings
    config = ModelConfig.model_validate(
        {
            "d_model": found.d_model,
            "d_ff": found.encoder_ffn_dim,
            "num_heads": found.encoder_attention_heads,
            "num_encoder_layers": found.encoder_layers,
            "num_decoder_layers": found.decoder_layers,
            "dropout": found.dropout,
            # It matters in training only, so a difference is no reason to refuse.
            "layer_drop": found.encoder_layerdrop if found.encoder_layerdrop == found.decoder_layerdrop else 0.0,
            "activation": ACTIVATIONS[found.activation_function],
            "shared_embeddings": is_shared and found.tie_word_embeddings,
            "tied_output": found.tie_word_embeddings,
            "output_bias": True,
        }
    )
    ids = SpecialTokens(found.decoder_start_token_id, found.eos_token_id, found.pad_token_id)
    target = found.vocab_size if is_shared else found.decoder_vocab_size or found.vocab_size
    return MarianSettings(config, ids, (found.vocab_size, target), is_shared)
