"""Import and export of Marian's own models: docs/interop.md.

Marian's tensors are ours by other names: matrices (input, output), vectors (1, D). What Marian computes was read from
src/models/transformer.h and src/layers of marian-nmt/marian-dev, version 1.12; `model.positions: marian` computes the same.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig, ModelConfig
from dist_transformer.config.yaml12 import dump, load
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.tokenizer.model_file import read_pieces_file, texts, with_rows
from dist_transformer.errors import CheckpointError, DataError, UserError
from dist_transformer.files import MISPLACED, patiently, write_text
from dist_transformer.interop import marian_vocabulary
from dist_transformer.interop.complete_folder import complete_folder
from dist_transformer.interop.foreign_weights import UNREACHABLE, Rows, filled
from dist_transformer.interop.marian import LENGTH_PENALTY, model_of, refuse_others, save_imported
from dist_transformer.interop.marian_vocabulary import SOURCE, TARGET, read_object, renumber, special_pieces
from dist_transformer.interop.marian_weights import layer_tensors
from dist_transformer.interop.model_card import CARD, exported_card
from dist_transformer.interop.model_folder import LoadedModel, card_of

MODEL, SETTINGS, DECODER = "model.npz", "special:model.yml", "decoder.yml"
START = "<start>"
"""Piece of the start symbol of an imported model, whose embedding is zero; Marian has no such symbol."""
ACTIVATION, ACTIVATIONS = "transformer-ffn-activation", {"swish": "silu", "relu": "relu"}
"""Our names by Marian's, whose GELU is an approximation."""
_SIZES = {"dim-emb": "d_model", "transformer-dim-ffn": "d_ff", "transformer-heads": "num_heads"}
_SIZES |= {"enc-depth": "num_encoder_layers", "dec-depth": "num_decoder_layers"}
_OFF = ("no-projection", "no-bias", "no-affine", "train-position-embeddings", "disable-position-embeddings", "pool")
_ALLOWED: dict[str, list[Any]] = {
    "type": ["transformer"],
    "transformer-ffn-depth": [2],
    "transformer-decoder-ffn-depth": [0, 2],
    "transformer-decoder-autoreg": ["self-attention"],
    "transformer-attention-mask": ["default"],
    "transformer-preprocess": ["", "d"],
    "transformer-postprocess": ["dan", "an"],
    "transformer-postprocess-emb": ["d", ""],
    "transformer-postprocess-top": ["", "d"],
    "transformer-tied-layers": [[]],
    "input-types": [[], ["sequence", "sequence"]],
    "lemma-dim-emb": [0],
    **{
        name: [False]
        for name in (*(f"transformer-{each}" for each in _OFF), "ulr", "right-left", "tied-embeddings-src")
    },
}
"""The values of settings that have a counterpart here; the first is that of a file that lacks the setting."""
_PLACES = {
    **{"self_attn": "self", "self_attn_layer_norm": "self_Wo_ln", "encoder_attn": "context"},
    **{"encoder_attn_layer_norm": "context_Wo_ln", "fc1": "ffn", "fc2": "ffn", "final_layer_norm": "ffn_ffn_ln"},
}
"""Marian's name of a part of a layer, by that of Hugging Face's MarianMTModel."""


def export_marian_npz(loaded: LoadedModel, out: Path) -> None:
    """Writes a folder for Marian's decoder, scorer and Python package. Raises UserError: the model has something that
    Marian lacks, or was not trained with what Marian computes."""
    config, information, model, files = loaded.config, loaded.information, loaded.model, loaded.tokenizer_files
    starts_at_zero = not model.target_embedding.weight[information.bos_id].any()
    expected = {"positions": ["marian"], "activation": list(ACTIVATIONS.values())}
    refuse_others(config, expected, [] if starts_at_zero else ["the embedding of its start symbol is not zero"])
    sizes = [information.source_vocabulary, information.target_vocabulary]
    settings = {name: values[0] for name, values in _ALLOWED.items() if name != "input-types"}
    settings |= {name: getattr(config, ours) for name, ours in _SIZES.items()}
    settings |= {ACTIVATION: next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)}
    settings |= {"tied-embeddings-all": config.shared_embeddings, "tied-embeddings": config.tied_output}
    with complete_folder(out, "a Marian folder") as folder:
        for name, path, rows in zip((SOURCE, TARGET), (files.source, files.target or files.source), sizes, strict=True):
            (folder / name).write_bytes(with_rows(read_pieces_file(path), rows))
        weights = {"output_bias": torch.zeros(sizes[1]), **dict(model.named_parameters())}
        tensors = {theirs: weights[ours] for ours, theirs in _embeddings(config).items()}
        tensors["decoder_ff_logit_out_b"] = weights["output_bias"][None]
        for ours, names in _layer_tensors(config):
            parts = weights[ours].chunk(len(names))
            tensors |= {name: part.T if part.ndim == 2 else part[None] for name, part in zip(names, parts, strict=True)}
        arrays = {name: tensor.detach().float().contiguous().numpy() for name, tensor in tensors.items()}
        arrays[SETTINGS] = np.frombuffer(dump({**settings, "dim-vocabs": sizes}).encode() + b"\0", np.int8)
        np.savez(folder / MODEL, **arrays)  # type: ignore[arg-type]
        decoder = {"relative-paths": True, "models": [MODEL], "vocabs": [SOURCE, TARGET], "normalize": LENGTH_PENALTY}
        batches = {"mini-batch": 16, "maxi-batch": 100, "maxi-batch-sort": "src"}
        batches |= {"max-length": 1000, "max-length-crop": True}  # without it the decoder ends at the first longer line
        write_text(folder / DECODER, dump({**decoder, "beam-size": DecodingConfig().beam_size, **batches}))
        write_text(folder / CARD, exported_card("marian-npz", card_of(loaded), asdict(information)))


def import_marian_npz(source: Path, out: Path) -> None:
    """Converts a folder with one decoder.yml, and the files that it names, to a model folder with the same logits. Raises
    the errors of `import_marian`."""
    found = sorted(source.glob(f"*{DECODER}"))
    decoder = read_object(found[0], load) if len(found) == 1 else {}
    models, vocabularies = (decoder.get(name) or [] for name in ("models", "vocabs"))
    if not (isinstance(models, list) and len(models) == 1 and isinstance(vocabularies, list) and vocabularies):
        raise DataError(
            f"{source}: expected one file *{DECODER}, as Marian writes it, with one model and the vocabularies (`models: "
            f"[model.npz]`, `vocabs: [source.spm, target.spm]`), found {len(found)} with {models} and {vocabularies}"
        )
    path = source / Path(str(models[0])).name
    arrays, settings = _read(path)
    config = _config_of(settings, path)
    paths = [source / Path(str(vocabularies[side])).name for side in (0, -1)]
    try:
        tensors = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
        embeddings = {ours: tensors.pop(theirs) for ours, theirs in _embeddings(config).items()}
        ids, sides = _vocabularies(paths, embeddings)
        weights = _from_marian(tensors, embeddings, config, sides[0][1], sides[1][1])
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:  # torch's, for types, shapes; a name
        raise CheckpointError(
            f"{path}: lacks a tensor that its settings tell, or its shape ({error}). Copy it again"
        ) from error
    save_imported(out, weights, config, sides, ids, ("", ""), "imported from a .npz of Marian")


def _config_of(settings: Mapping[str, Any], path: Path) -> ModelConfig:
    """Our configuration of the same network. UserError: all settings without a counterpart, together."""
    allowed = {**_ALLOWED, "transformer-decoder-dim-ffn": [0, settings.get("transformer-dim-ffn")]}
    problems = [
        f"{name}: expected {' or '.join(map(str, values))}, got {settings[name]}"
        for name, values in {**allowed, ACTIVATION: list(ACTIVATIONS)}.items()
        if settings.get(name, values[0]) not in values
    ]
    is_tied, is_shared = (bool(settings.get(name)) for name in ("tied-embeddings", "tied-embeddings-all"))
    given: dict[str, Any] = {ours: settings.get(name) for name, ours in _SIZES.items()}
    given |= {"shared_embeddings": is_shared, "tied_output": is_shared or is_tied, "output_bias": True}
    given |= {"activation": ACTIVATIONS.get(settings.get(ACTIVATION, "swish"), "silu"), "positions": "marian"}
    advice = (
        "Give a post-norm Transformer with self-attention in its decoder (Bergamot's students have SSRU cells there, "
        "autoreg rnn), or train such a one"
    )
    return model_of(given, problems, path, advice)


def _vocabularies(
    paths: list[Path], embeddings: Mapping[str, Tensor]
) -> tuple[SpecialTokens, list[tuple[bytes, Rows]]]:
    """The special ids, and for source and target the content of the sentencepiece model and the rows."""
    rows, start, unknown, end = max(map(len, embeddings.values())), -1, "<unk>", "</s>"
    if all(path.suffix == ".spm" for path in paths):
        protos = [read_pieces_file(path) for path in paths]
        numbers: list[dict[str, Any]] = [{text: id for id, text in enumerate(texts(proto))} for proto in protos]
        trainer = protos[1].trainer_spec
        start, unknown, end = trainer.bos_id, trainer.unk_piece, trainer.eos_piece
    else:
        protos = [read_pieces_file(paths[0].parent / name) for name in (SOURCE, TARGET)]
        numbers = [read_object(path, partial(load, are_texts=True)) for path in paths]
        numbers = [{text: int(id) if str(id).isdecimal() else id for text, id in each.items()} for each in numbers]
    pieces = [marian_vocabulary.numbered_pieces(each, path, rows) for each, path in zip(numbers, paths, strict=True)]
    is_shared = "target_embedding.weight" not in embeddings
    if is_shared and pieces[0] != pieces[1]:
        raise UserError(f"{paths[0]} and {paths[1]}: other pieces for one matrix of both sides; take the model's own")
    target_VD = embeddings["source_embedding.weight" if is_shared else "target_embedding.weight"]
    if not 0 <= start < len(target_VD) or target_VD[start].any() or pieces[0][start] != pieces[1][start]:
        start, pieces = rows, [[*each, START] for each in pieces]
    ids = SpecialTokens(start, pieces[1].index(end) if end in pieces[1] else len(pieces[1]), start)
    return ids, renumber(protos, pieces, special_pieces(pieces, unknown, ids, paths[0].parent), is_shared)


def _from_marian(
    left: dict[str, Tensor], embeddings: Mapping[str, Tensor], config: ModelConfig, source: Rows, target: Rows
) -> dict[str, Tensor]:
    """Our weights. CheckpointError names tensors that have no place in them."""
    weights = {}
    for ours, names in _layer_tensors(config):
        is_vector = ours.endswith((".bias", "norm.weight"))
        weights[ours] = torch.cat([left.pop(name).flatten() if is_vector else left.pop(name).T for name in names])
    bias_1V = left.pop("decoder_ff_logit_out_b", torch.zeros(1, target.imported))
    for ours, tensor in {**embeddings, "output_bias": bias_1V.flatten()}.items():
        rows, filler = source if ours.startswith("source") else target, UNREACHABLE if ours == "output_bias" else 0.0
        unused = tensor.new_full((rows.imported - len(tensor), *tensor.shape[1:]), filler)
        weights[ours] = filled(torch.cat([tensor, unused]), rows, filler)
    if left:
        raise CheckpointError(f"the .npz holds {len(left)} tensors without a place here: {', '.join(sorted(left)[:5])}")
    return weights


def _embeddings(config: ModelConfig) -> dict[str, str]:
    """Marian's names of the matrices with a row for each piece, by ours."""
    names = {"source_embedding.weight": "encoder_Wemb", "target_embedding.weight": "decoder_Wemb"}
    names = {"source_embedding.weight": "Wemb"} if config.shared_embeddings else names
    return names if config.tied_output else {**names, "output.weight": "decoder_ff_logit_out_Wt"}


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Yields our name, and Marian's names of its parts, of every tensor of the layers."""
    for ours, names, _ in layer_tensors(config):
        yield ours, [_name_of(*name.split(".")) for name in names]


def _name_of(_: str, side: str, _layers: str, number: str, part: str, *rest: str) -> str:
    """encoder_l1_self_Wq for model.encoder.layers.0.self_attn.q_proj.weight."""
    place, kind = _PLACES[part], {"weight": "scale", "bias": "bias"}[rest[-1]]
    if not place.endswith("ln"):
        kind = ("b" if rest[-1] == "bias" else "W") + (part.removeprefix("fc") if place == "ffn" else rest[0][0])
    return f"{side}_l{int(number) + 1}_{place}_{kind}"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a .npz by name, and its settings. CheckpointError: it is missing, damaged, or not Marian's."""
    try:
        arrays = patiently(path, lambda: _arrays(path), MISPLACED)
        return arrays, {**load(arrays.pop(SETTINGS).tobytes().rstrip(b"\0").decode())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
        raise CheckpointError(
            f"{path}: not a complete .npz of Marian with {SETTINGS} ({error}). Copy it again; a .bin cannot be imported"
        ) from error


def _arrays(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
