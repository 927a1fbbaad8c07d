"""Import and export of Hugging Face's MarianMTModel folders, such as OPUS-MT, without the package transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from dist_transformer.config.checks import check_model
from dist_transformer.config.loading import value_problem
from dist_transformer.config.model_size import has_final_norm, head_sizes
from dist_transformer.config.schema import DecodingConfig, ModelConfig
from dist_transformer.config.section import Bool, Fraction, PositiveInt
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.files import write_json, write_text
from dist_transformer.interop import marian_vocabulary, model_folder
from dist_transformer.interop.complete_folder import complete_folder
from dist_transformer.interop.foreign_weights import Rows, read_tensors
from dist_transformer.interop.marian_vocabulary import export_vocabulary, import_vocabulary, read_object
from dist_transformer.interop.marian_weights import from_marian, to_marian
from dist_transformer.interop.model_card import CARD, Origin, exported_card
from dist_transformer.interop.model_folder import LoadedModel, ModelInformation, save_model_folder, write_safetensors

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, PICKLED_WEIGHTS = "model.safetensors", "pytorch_model.bin"
NEAREST_LENGTH_TOKENS = 25
"""Length at which the exported length penalty has the same slope as ours."""
LENGTH_PENALTY = round(DecodingConfig().length_penalty * NEAREST_LENGTH_TOKENS / (5 + NEAREST_LENGTH_TOKENS), 3)
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
"""Our names by Marian's."""

Id = Annotated[int, Field(ge=0, strict=True)]


def import_marian(source: Path, out: Path) -> None:
    """Converts the folder `source` to a model folder with the same logits and token ids. Raises CheckpointError: weights
    are missing, damaged, or not those of their settings; DataError: a file is missing or invalid; UserError: a setting has
    no counterpart here."""
    settings = read_settings(source / CONFIG)
    config, ids = settings.config, settings.ids
    sides = import_vocabulary(source, settings.sizes, settings.share_encoder_decoder_embeddings, ids)
    file = next((source / name for name in (WEIGHTS, PICKLED_WEIGHTS) if (source / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{source}: no weights, expected {WEIGHTS} or {PICKLED_WEIGHTS}.")
    weights = from_marian(read_tensors(file), config, sides[0][1], sides[1][1])
    names = marian_vocabulary.read_tokenizer_names(source)
    languages, how = (names["source_lang"], names["target_lang"]), "imported from a MarianMTModel of Hugging Face"
    save_imported(out, weights, config, sides, ids, languages, how)


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


def read_settings(path: Path) -> MarianSettings:
    """Reads config.json, where null counts as missing. Raises DataError: the file is missing, or no JSON object; UserError:
    all entries that are missing, of the wrong type, or without a counterpart here, together."""
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


def save_imported(
    out: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    sides: Sequence[tuple[bytes, Rows]],
    ids: SpecialTokens,
    languages: tuple[str, str],
    how: str,
) -> None:
    """Writes the model folder of an import. `sides`: as `import_vocabulary` returns them; `how`: as of `Origin`."""
    (of_source, source_rows), (of_target, target_rows) = sides
    information = ModelInformation(
        source_vocabulary=source_rows.all,
        target_vocabulary=target_rows.all,
        pad_id=ids.pad,
        bos_id=ids.bos,
        eos_id=ids.eos,
        source_language=languages[0],
        target_language=languages[1],
        step=0,
    )
    with TemporaryDirectory() as folder:
        Path(folder, "source.model").write_bytes(of_source)
        if of_target != of_source:
            Path(folder, "target.model").write_bytes(of_target)
        save_model_folder(out, weights, config, model_folder.tokenizer_files(Path(folder)), information, Origin(how))


def export_marian(loaded: LoadedModel, out: Path) -> None:
    """Writes a folder for `MarianMTModel.from_pretrained` and `MarianTokenizer.from_pretrained`, which the Hub takes.
    Raises UserError: the model has something that MarianMTModel lacks."""
    config, information = loaded.config, loaded.information
    refuse_others(config, {"positions": ["sinusoidal"], "activation": sorted(set(ACTIVATIONS.values()))})
    with complete_folder(out, "a Marian folder") as folder:
        languages = (information.source_language, information.target_language)
        num_source, num_target = export_vocabulary(folder, loaded.tokenizer_files, config.shared_embeddings, languages)
        tensors = to_marian(dict(loaded.model.named_parameters()), config, num_source, num_target)
        write_safetensors({name: each.detach() for name, each in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
        write_json(folder / CONFIG, _marian_config(config, information, num_source, num_target))
        write_json(folder / GENERATION, _generation_config(information))
        write_text(folder / CARD, exported_card("marian", model_folder.card_of(loaded), asdict(information)))


def refuse_others(config: ModelConfig, allowed: Mapping[str, Sequence[str]], others: Sequence[str] = ()) -> None:
    """Raises UserError if the model is not as every exported one for Marian, with one of the values of `allowed`."""
    found = {**config.model_dump(), "final_norm": has_final_norm(config)}
    found["key_size"], found["value_size"] = head_sizes(config)
    of_all: dict[str, Sequence[Any]] = {"norm": ["post"], "norm_type": ["layer"], "final_norm": [False]}
    of_all["num_heads"] = [number for number in range(1, config.d_model + 1) if config.d_model % number == 0]
    of_all |= {name: [config.d_model // config.num_heads] for name in ("key_size", "value_size")}
    problems = [
        f"model.{name} is {found[name]}, expected {' or '.join(map(str, values))}"
        for name, values in {**of_all, **allowed}.items()
        if found[name] not in values
    ]
    if problems := [*problems, *others]:
        raise UserError(
            f"this model cannot be one for Marian: {'; '.join(problems)}. Export it to another format (ctranslate2), or "
            "train one with these settings (training.init_from with training.init_partially starts from this one)"
        )


def _marian_config(
    config: ModelConfig, information: ModelInformation, num_source: int, num_target: int
) -> dict[str, Any]:
    theirs = {ours: name for name, ours in ACTIVATIONS.items()}
    of_both = {"attention_heads": config.num_heads, "ffn_dim": config.d_ff, "layerdrop": config.layer_drop}
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": num_source,
        "decoder_vocab_size": num_target,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in of_both.items()},
        "activation_function": theirs[config.activation],
        "dropout": config.dropout,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "share_encoder_decoder_embeddings": config.shared_embeddings,
        "tie_word_embeddings": config.tied_output,
        "max_position_embeddings": marian_vocabulary.LONGEST_TOKENS,
        **_special_ids(information),
        "dtype": "float32",
    }


def _special_ids(information: ModelInformation) -> dict[str, Any]:
    return {
        "decoder_start_token_id": information.bos_id,
        "bos_token_id": information.bos_id,
        "eos_token_id": information.eos_id,
        "forced_eos_token_id": information.eos_id,
        "pad_token_id": information.pad_id,
    }


def _generation_config(information: ModelInformation) -> dict[str, Any]:
    """Content of generation_config.json; Hugging Face divides log-probabilities by length ** length_penalty."""
    never, search = sorted({information.pad_id, information.bos_id}), DecodingConfig()
    return {
        **_special_ids(information),
        "bad_words_ids": [[number] for number in never],
        "num_beams": search.beam_size,
        "length_penalty": LENGTH_PENALTY,
        "max_length": marian_vocabulary.LONGEST_TOKENS,
    }
