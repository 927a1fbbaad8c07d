"""Import and export of the tokenizer of Hugging Face's Marian folders: docs/interop.md."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.tokenizer import model_file
from dist_transformer.data.tokenizer.model_file import BLANK, Kind, SpecialPieces, read_pieces_file, texts
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, round_up
from dist_transformer.errors import DataError, UserError
from dist_transformer.files import MISPLACED, patiently, write_json
from dist_transformer.interop.foreign_weights import Rows
from dist_transformer.interop.model_folder import TokenizerFiles

SOURCE, TARGET, VOCABULARY, TARGET_VOCABULARY = "source.spm", "target.spm", "vocab.json", "target_vocab.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
LONGEST_TOKENS = 1024
"""Positions of an exported model: Hugging Face computes them on loading and accepts no longer sentence."""


def import_vocabulary(
    folder: Path, sizes: tuple[int, int], is_shared: bool, ids: SpecialTokens
) -> list[tuple[bytes, Rows]]:
    """Returns, of the source and of the target, the content of the sentencepiece model, and the rows of the vocabulary.
    Raises DataError: a file is missing or invalid; UserError: the vocabulary has no counterpart here.

    `sizes`: the rows of Marian's matrices.
    """
    protos = [read_pieces_file(folder / name) for name in (SOURCE, TARGET)]
    names = (VOCABULARY, VOCABULARY if is_shared else TARGET_VOCABULARY)
    paths = [folder / name for name in names]
    pieces = [numbered_pieces(read_object(path), path, size) for path, size in zip(paths, sizes, strict=True)]
    special = special_pieces(pieces, read_tokenizer_names(folder)["unk_token"], ids, folder)
    return renumber(protos, pieces, special, is_shared)


def renumber(
    protos: Sequence[Any], pieces: Sequence[list[str]], special: SpecialPieces, is_shared: bool
) -> list[tuple[bytes, Rows]]:
    """Returns what `import_vocabulary` does, of two models, and the pieces that their ids shall be those of."""
    added = [_not_in(numbered, [proto]) for proto, numbered in zip(protos, pieces, strict=True)]
    if is_shared:
        added = [_not_in(pieces[0], protos)] * 2
    return [_imported(*side, special) for side in zip(protos, pieces, added, strict=True)]


def export_vocabulary(folder: Path, files: TokenizerFiles, is_shared: bool, languages: tuple[str, str]) -> list[int]:
    """Writes the tokenizer's files into `folder` and returns the number of pieces of each side. Raises UserError if one
    matrix is used for two different vocabularies, or a tag is a language code for MarianTokenizer."""
    tokenizer = Tokenizer.load(files.source, files.target)
    paths = [files.source, files.target or files.source]
    protos = [read_pieces_file(path) for path in paths]
    whole = [piece.piece for piece in protos[0].pieces if piece.type == Kind.USER_DEFINED]
    tags = [text for text in whole if _language_code(BLANK + text) == text]
    if tags and protos[0].normalizer_spec.add_dummy_prefix:
        raise UserError(
            f"{files.source}: has the pieces {' '.join(tags)}, tags that the model has seen with a blank before them. To "
            "MarianTokenizer they are language codes, without that blank: the model would get other tokens. Export it to "
            "another format (ctranslate2), or train one with tags of another form, as <2deu>"
        )
    vocabularies = [_marian_vocabulary(proto, tokenizer.pad_id) for proto in protos]
    if is_shared and vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"{files.source} and {files.target}: the model has one matrix for both languages, but its tokenizers number "
            "their pieces differently: this folder cannot be right; take the tokenizers that it was trained with"
        )
    for name, path, proto in zip((SOURCE, TARGET), paths, protos, strict=True):
        left_out = {*model_file.never_produced(proto), *(text for text in texts(proto) if _language_code(text) != text)}
        (folder / name).write_bytes(model_file.without(proto, left_out) if left_out else path.read_bytes())
    write_json(folder / VOCABULARY, vocabularies[0])
    if not is_shared:
        write_json(folder / TARGET_VOCABULARY, vocabularies[1])
    settings = _tokenizer_config(protos[0], tokenizer, vocabularies[1], is_shared, languages)
    write_json(folder / TOKENIZER_CONFIG, settings)
    return [len(vocabulary) for vocabulary in vocabularies]


def read_tokenizer_names(folder: Path) -> dict[str, str]:
    """Returns unk_token, source_lang and target_lang of tokenizer_config.json, which is optional, else their defaults.
    Raises DataError if one is no text."""
    path = folder / TOKENIZER_CONFIG
    content = read_object(path) if path.exists() else {}
    unknown = content.get("unk_token") or "<unk>"
    found: dict[str, Any] = {
        "unk_token": unknown.get("content") if isinstance(unknown, dict) else unknown,
        "source_lang": content.get("source_lang") or "",
        "target_lang": content.get("target_lang") or "",
    }
    for name, value in found.items():
        if not isinstance(value, str):
            raise DataError(f"{path}: {name} is {value!r}, expected text. Copy it again.")
    return found


def read_object(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """The JSON object of a file, or what `parse` makes of it. DataError: it is missing or something else."""
    try:
        content = parse(patiently(path, lambda: path.read_text(encoding="utf-8"), MISPLACED))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}), expected one of the model to be read.") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON or YAML ({error}). Copy it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected names with values, got {type(content).__name__}. Copy it again.")
    return content


def numbered_pieces(numbers: Mapping[str, Any], path: Path, size: int) -> list[str]:
    """The text of each id; ids that the vocabulary in `path` lacks get a text that never occurs. DataError: other ids."""
    text_of: dict[int, str] = {}
    for text, number in numbers.items():
        if type(number) is not int or not 0 <= number < size:
            raise DataError(f"{path}: the piece {text!r} has the id {number!r}, expected 0 to {size - 1} (vocab_size)")
        if text_of.setdefault(number, text) != text:
            raise DataError(f"{path}: {text!r} and {text_of[number]!r} have one id, {number}: expected one piece each")
    return [text_of.get(number) or f"<unused_{number}>" for number in range(size)]


def special_pieces(pieces: Sequence[list[str]], unknown: str, ids: SpecialTokens, folder: Path) -> SpecialPieces:
    """The names of the special ids. UserError: they are not the same on both sides. DataError: no unknown piece."""
    for name, number in (("eos_token_id", ids.eos), ("pad_token_id", ids.pad), ("decoder_start_token_id", ids.bos)):
        found = [numbered[number] if number < len(numbered) else None for numbered in pieces]
        if found[0] is None or found[0] != found[1]:
            raise UserError(
                f"{folder}: {name} {number} is {found[0]!r} in the source's vocabulary and {found[1]!r} in the target's: "
                "expected the same piece, as ids of special pieces are common to both sides here"
            )
    if not all(unknown in numbered for numbered in pieces):
        raise DataError(f"{folder}: no piece {unknown!r} in a vocabulary, expected one for unknown text")
    text = pieces[1]
    return SpecialPieces(unknown, begin=text[ids.bos], end=text[ids.eos], padding=text[ids.pad])


def _not_in(numbered: list[str], protos: Sequence[Any]) -> list[str]:
    """Pieces that text may be cut into, but that have no number; each once."""
    known = set(numbered)
    return list(dict.fromkeys(text for proto in protos for text in model_file.produced(proto) if text not in known))


def _imported(proto: Any, numbered: list[str], added: list[str], special: SpecialPieces) -> tuple[bytes, Rows]:
    blank = BLANK if proto.normalizer_spec.add_dummy_prefix else ""
    codes = {text: blank + text for text in set(numbered) - set(texts(proto)) if text[:2] == ">>" and text[-2:] == "<<"}
    pieces = [codes.get(text, text) for text in (*numbered, *added)]
    rows = Rows(len(numbered), len(added), round_up(len(pieces)), numbered.index(special.unknown))
    return model_file.renumbered(proto, pieces, special, codes.values()), rows


def _marian_vocabulary(proto: Any, pad_id: int) -> dict[str, int]:
    """Content of vocab.json: the id of each piece; padding without a piece gets one."""
    pieces = [_language_code(text) for text in texts(proto)]
    named = model_file.names_of_rows(pieces, max(len(pieces), pad_id + 1), pad_id)
    return {text: number for number, text in enumerate(named)}


def _language_code(piece: str) -> str:
    """The language code of a piece as Marian writes it; any other piece unchanged."""
    is_code = piece.startswith(f"{BLANK}>>") and piece.endswith("<<")
    return piece.removeprefix(BLANK) if is_code else piece


def _tokenizer_config(
    proto: Any, tokenizer: Tokenizer, target: Mapping[str, int], is_shared: bool, languages: tuple[str, str]
) -> dict[str, Any]:
    text_of = {number: text for text, number in target.items()}
    names: dict[str, Any] = {"eos_token": text_of[tokenizer.eos_id], "pad_token": text_of[tokenizer.pad_id]}
    if tokenizer.bos_id != tokenizer.pad_id:
        names["bos_token"] = text_of[tokenizer.bos_id]
    return {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": languages[0],
        "target_lang": languages[1],
        "unk_token": proto.trainer_spec.unk_piece,
        "separate_vocabs": not is_shared,
        "model_max_length": LONGEST_TOKENS,
        "clean_up_tokenization_spaces": False,
        **names,
    }
