"""A model folder as a model of CTranslate2, or as a package of Argos Translate: docs/interop.md.

Its vocabulary names each row of the model by its piece: input and output are pieces.
"""

import inspect
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import torch
from torch import Tensor, nn

from dist_transformer.config.data_checks import language_code
from dist_transformer.config.model_size import has_final_norm, head_sizes
from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.tokenizer.model_file import names_of_rows, read_pieces_file, texts
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.files import read_json, replacing, write_json, write_text
from dist_transformer.interop.complete_folder import complete_folder
from dist_transformer.interop.model_card import CARD, exported_card
from dist_transformer.interop.model_folder import SOURCE_MODEL, TARGET_MODEL, LoadedModel, ModelInformation, card_of
from dist_transformer.interop.shortlist import VOCABULARY_MAP, read_lexicon, vocabulary_map
from dist_transformer.model.layers import AddAndNorm, FeedForward
from dist_transformer.run.outputs import is_stream, writing

INFORMATION = "dist_transformer.json"
NAMES = "ar:Arabic cs:Czech de:German en:English es:Spanish fr:French it:Italian ja:Japanese nl:Dutch pl:Polish pt:Portuguese "
NAMES += "ru:Russian sv:Swedish tr:Turkish uk:Ukrainian zh:Chinese"
"""Names of languages that Argos Translate shows; of others it shows the code."""
LONGEST_TOKENS = 1024
"""Positions written into the exported model if ours has no limit: in fp32, they are a large part of a small int8 model."""


def export_ctranslate2(
    loaded: LoadedModel,
    out: Path,
    quantization: str | None = None,
    shortlist: Sequence[Path] = (),
    longest: int = LONGEST_TOKENS,
) -> None:
    """Writes a folder for `ctranslate2.Translator`.

    `quantization`: type of the stored matrices, int8, int16, float16 or bfloat16; None: fp32. `shortlist`: as for `read_lexicon`.
    `longest`: positions of a model that has no limit.

    Raises UserError: the package ctranslate2 is missing, or the model has something that CTranslate2 lacks.
    """
    keys, values = head_sizes(loaded.config)
    if keys != values:
        raise UserError(
            f"this model cannot be exported to ctranslate2: its heads have keys of size {keys} and values of size {values} "
            "(model.key_size, model.value_size), CTranslate2 wants one size"
        )
    lexicon = read_lexicon(shortlist, loaded) if shortlist else None
    spec = _spec(loaded, longest)
    spec.validate()
    spec.optimize(quantization=quantization)
    files = loaded.tokenizer_files
    with complete_folder(out, "a CTranslate2 folder") as folder:
        spec.save(str(folder))
        shutil.copyfile(files.source, folder / SOURCE_MODEL)
        if files.target is not None:
            shutil.copyfile(files.target, folder / TARGET_MODEL)
        about, (source, target) = loaded.information, read_vocabularies(folder)
        if lexicon is not None:
            write_text(folder / VOCABULARY_MAP, vocabulary_map(lexicon, source, target))
        limit = None if loaded.config.positions == "rotary" else loaded.config.max_positions or longest
        write_json(folder / INFORMATION, {**asdict(about), "max_positions": limit})
        end = [] if Tokenizer.load(files.source, files.target).source_end == about.pad_id else [source[about.eos_id]]
        never = [[target[number]] for number in sorted({about.bos_id, about.pad_id} - {about.eos_id})]
        of_code = {"target_model": SOURCE_MODEL if files.target is None else TARGET_MODEL, "end": end, "never": never}
        card = exported_card("ctranslate2", card_of(loaded), asdict(about), limit=limit, **of_code)
        write_text(folder / CARD, card)


def export_argos(loaded: LoadedModel, out: Path, quantization: str | None = None) -> None:
    """Writes a file for `argostranslate.package.install_from_path`; `quantization` as for `export_ctranslate2`. Raises
    UserError: the model has two sentencepiece models, or no languages, or CTranslate2 cannot have it."""
    if loaded.tokenizer_files.target is not None:
        raise UserError("--to argos: a package has one sentencepiece model, this one two: train tokenizer.shared: true")
    about = loaded.information
    source, target = language_code(about.source_language), language_code(about.target_language)
    if not (source.isalnum() and target.isalnum()):
        raise UserError(
            "--to argos: no codes of languages: set source_language and target_language in the model's config.json, as en and de"
        )
    metadata = {"package_version": "1.0", "argos_version": "1.0", "from_code": source, "to_code": target}
    names = dict(each.split(":") for each in NAMES.split())
    metadata |= {"from_name": names.get(source, source), "to_name": names.get(target, target)}
    with writing(out), TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        export_ctranslate2(loaded, model, quantization)
        for name in (INFORMATION, CARD):
            (model / name).unlink()
        contents: dict[str, str | bytes] = {
            **{f"model/{path.name}": path.read_bytes() for path in model.iterdir()},
            # Argos gives CTranslate2 the pieces of a sentence without their end.
            "model/config.json": json.dumps({**read_json(model / "config.json"), "add_source_eos": True}),
            "metadata.json": json.dumps(metadata),
            "README.md": exported_card("argos", card_of(loaded), asdict(about)),
        }
        contents["sentencepiece.model"] = contents.pop(f"model/{SOURCE_MODEL}")
        opened = out.open("wb") if is_stream(out) else replacing(Path(os.path.realpath(out)))  # a link stays a link
        with opened as file, ZipFile(file, "w") as package:
            for name, content in sorted(contents.items()):  # without times: equal models become equal packages
                package.writestr(ZipInfo(f"translate-{source}_{target}/{name}"), content, ZIP_DEFLATED)


def load_exported(folder: Path) -> tuple[ModelInformation, int | None]:
    """Reads our file next to CTranslate2's: what is known of the model, and the longest source and translation in tokens;
    None: no limit. Raises CheckpointError if it is missing or something else."""
    path = folder / INFORMATION
    try:
        content = read_json(path)
        max_positions = content.pop("max_positions")
        return ModelInformation(**content), max_positions
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: missing or damaged ({error}), expected what `dist-transformer export --to ctranslate2` writes"
        ) from error


def read_vocabularies(folder: Path) -> list[list[str]]:
    """Names of the rows of source and target embedding of an exported model."""
    both = ["shared"] * 2 if (folder / "shared_vocabulary.json").is_file() else ["source", "target"]
    return [list(read_json(folder / f"{side}_vocabulary.json")) for side in both]


def is_exported(folder: Path) -> bool:
    """True if `export_ctranslate2` wrote the folder."""
    return (folder / INFORMATION).is_file()


def import_ctranslate2() -> Any:
    """Returns the package. Raises UserError if it is not installed, or too old."""
    try:
        import ctranslate2
        import ctranslate2.specs

        if "head_dim" not in inspect.signature(ctranslate2.specs.TransformerEncoderSpec.__init__).parameters:
            raise ImportError(f"it is {ctranslate2.__version__}, expected 4.6.3 or newer")
    except ImportError as error:
        raise UserError(
            f"this needs the package ctranslate2, which cannot be used ({error}): pip install 'dist-transformer[export]'"
        ) from error
    return ctranslate2


def _spec(loaded: LoadedModel, longest: int) -> Any:
    specs = import_ctranslate2().specs
    config, model = loaded.config, loaded.model
    kinds = specs.Activation
    by_name = {"relu": kinds.RELU, "gelu": kinds.GELU, "silu": kinds.SWISH, "swiglu": kinds.SWISH}
    of_both: dict[str, Any] = dict(
        num_heads=config.num_heads,
        pre_norm=True,  # creates the entry of a final norm, which post-norm models may have too; set below
        activation=by_name[config.activation],
        ffn_glu=config.activation == "swiglu",
        rms_norm={"layer": False, "rms": True}[config.norm_type],
        head_dim=head_sizes(config)[0],
        no_final_norm=not has_final_norm(config),
    )
    if config.positions == "rotary":
        of_both.update(rotary_dim=0, rotary_interleave=True)
    encoder = specs.transformer_spec.TransformerEncoderSpec(config.num_encoder_layers, **of_both)
    decoder = specs.transformer_spec.TransformerDecoderSpec(config.num_decoder_layers, **of_both)
    spec = specs.TransformerSpec(encoder, decoder)
    _set_stack(encoder, encoder.embeddings[0], model.source_embedding, model.source_positions, config, longest)
    _set_stack(decoder, decoder.embeddings, model.target_embedding, model.target_positions, config, longest)
    layers: list[Any] = [*model.encoder_layers, *model.decoder_layers]
    for layer_spec, layer in zip([*encoder.layer, *decoder.layer], layers, strict=True):
        own = layer.self_attention
        _set_attention(layer_spec.self_attention, [own.query_key_value], own.output, layer.self_attention_residual)
        _set_feed_forward(layer_spec.ffn, layer.feed_forward, layer.feed_forward_residual)
    for layer_spec, layer in zip(decoder.layer, layers[len(model.encoder_layers) :], strict=True):
        cross, residual = layer.cross_attention, layer.cross_attention_residual
        _set_attention(layer_spec.attention, [cross.query, cross.key_value], cross.output, residual)
    for stack, norm in ((encoder, model.encoder_norm), (decoder, model.decoder_norm)):
        stack.pre_norm = config.norm == "pre"
        if has_final_norm(config):
            _set_norm(stack.layer_norm, norm)
    decoder.projection.weight = _array(model.output_weight)
    if model.output_bias is not None:
        decoder.projection.bias = _array(model.output_bias)
    _set_vocabulary(spec, loaded)
    spec.config.layer_norm_epsilon = float(layers[0].self_attention_residual.norm.eps)
    return spec


def _set_stack(
    spec: Any, embeddings: Any, embedding: nn.Embedding, positions: Any, config: ModelConfig, longest: int
) -> None:
    embeddings.weight = _array(embedding.weight)
    if config.positions == "rotary":
        vars(spec).pop("position_encodings", None)
    elif config.positions == "learned":
        spec.position_encodings.encodings = _array(positions.table.weight)
    else:
        spec.position_encodings.encodings = _array(positions(0, longest, embedding.weight))


def _set_attention(spec: Any, inputs: Sequence[nn.Linear], output: nn.Linear, residual: AddAndNorm) -> None:
    for linear_spec, linear in zip(spec.linear, inputs, strict=False):
        _set_linear(linear_spec, linear)
    _set_linear(spec.linear[-1], output, residual.alpha)
    _set_norm(spec.layer_norm, residual.norm)


def _set_feed_forward(spec: Any, feed_forward: FeedForward, residual: AddAndNorm) -> None:
    if feed_forward.gate is None:
        _set_linear(spec.linear_0, feed_forward.inner)
    else:
        _set_linear(spec.linear_0, feed_forward.gate)
        _set_linear(spec.linear_0_noact, feed_forward.inner)
    _set_linear(spec.linear_1, feed_forward.outer, residual.alpha)
    _set_norm(spec.layer_norm, residual.norm)


def _set_linear(spec: Any, linear: nn.Linear, alpha: float = 1.0) -> None:
    """Sets weights divided by alpha: DeepNorm's norm(alpha x + f(x)) is norm(x + f(x) / alpha), except for epsilon."""
    spec.weight, spec.bias = _array(linear.weight / alpha), _array(linear.bias / alpha)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    if getattr(norm, "bias", None) is not None:
        spec.beta = _array(norm.bias)


def _set_vocabulary(spec: Any, loaded: LoadedModel) -> None:
    files, information = loaded.tokenizer_files, loaded.information
    source, target = (read_pieces_file(path) for path in (files.source, files.target or files.source))
    source_tokens = names_of_rows(texts(source), information.source_vocabulary, information.pad_id)
    tokens = names_of_rows(texts(target), information.target_vocabulary, information.pad_id)
    spec.register_source_vocabulary(source_tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = spec.config.decoder_start_token = tokens[information.bos_id]
    spec.config.eos_token = tokens[information.eos_id]
    spec.config.unk_token = target.trainer_spec.unk_piece
    spec.config.add_source_bos = spec.config.add_source_eos = False


def _array(tensor: Tensor) -> Any:
    """Copy of a tensor, because quantization writes into it."""
    return tensor.detach().float().clone(memory_format=torch.contiguous_format).numpy()
