"""Reader of config.json of a MarianMTModel: checks type and range of every entry that matters."""

from collections.abc import Mapping, Sequence
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


class MarianSettings(BaseModel):
    """The entries of config.json that matter; those without a default must be given."""

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

    @property
    def ids(self) -> SpecialTokens:
        return SpecialTokens(self.decoder_start_token_id, self.eos_token_id, self.pad_token_id)

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of Marian's matrices, the source's and the target's."""
        own = None if self.share_encoder_decoder_embeddings else self.decoder_vocab_size
        return self.vocab_size, own or self.vocab_size

    @property
    def config(self) -> ModelConfig:
        """The same model as our configuration."""
        both_drop_as_many = self.encoder_layerdrop == self.decoder_layerdrop
        return ModelConfig(
            d_model=self.d_model,
            d_ff=self.encoder_ffn_dim,
            num_heads=self.encoder_attention_heads,
            num_encoder_layers=self.encoder_layers,
            num_decoder_layers=self.decoder_layers,
            dropout=self.dropout,
            # It matters in training only, so a difference is no reason to refuse.
            layer_drop=self.encoder_layerdrop if both_drop_as_many else 0.0,
            activation=ACTIVATIONS[self.activation_function],
            shared_embeddings=self.share_encoder_decoder_embeddings and self.tie_word_embeddings,
            tied_output=self.tie_word_embeddings,
            output_bias=True,
        )


def model_of(given: Mapping[str, Any], problems: Sequence[str], path: Path, advice: str) -> ModelConfig:
    """Our configuration of the network described in `path`. UserError: all its problems, after those found before."""
    try:
        config = ModelConfig.model_validate(given)
        found = list(check_model(config))
    except ValidationError as error:
        found = [f"{each['loc'][0]}: {value_problem((), each)}" for each in error.errors()]
    if found := list(dict.fromkeys([*problems, *found])):
        raise _refusal(path, found, advice)
    return config


def read_settings(path: Path) -> MarianSettings:
    """Reads config.json, where null counts as missing.

    Raises:
        DataError: the file is missing, or no JSON object.
        UserError: all entries that are missing, of the wrong type, or without a counterpart here, together.
    """
    try:
        return MarianSettings(**{name: value for name, value in read_object(path).items() if value is not None})
    except ValidationError as error:
        problems = [
            f"{each['loc'][0]}: {'is missing' if each['type'] == 'missing' else value_problem((), each)}"
            for each in error.errors()
        ]
    advice = "Give a folder of a MarianMTModel that Hugging Face's save_pretrained wrote, with its tokenizer"
    raise _refusal(path, problems, advice)


def _refusal(path: Path, problems: Sequence[str], advice: str) -> UserError:
    return UserError("\n  ".join([f"{path}: cannot be imported:", *problems]) + f"\n{advice}")
