"""New pieces at the end of a sentencepiece model: existing ids stay the same, and other text is cut as before.

A new piece is kept as one piece at any place of a text, also within a word; one that begins with a blank, `▁Wetter`,
only at the beginning of a word; and `New▁York` is two words.
"""

from collections.abc import Sequence
from pathlib import Path

from dist_transformer.data.tokenizer.model_file import BLANK, Kind, read_pieces_file, texts
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import DataError
from dist_transformer.files import replacing

JOINERS = {0x200C: None, 0x200D: None}
"""Invisible characters that the spelling of some scripts needs."""


def missing_pieces(model: Path, pieces: Sequence[str]) -> list[str]:
    """Returns the members of `pieces` that the model does not have, each once."""
    there = set(texts(read_pieces_file(model)))
    return [piece for piece in dict.fromkeys(pieces) if piece not in there]


def add_pieces(model: Path, pieces: Sequence[str], out: Path) -> None:
    """Writes the model with `pieces`, which it does not have, appended to its own; completely or not at all. Raises
    DataError: the file is no model, or a piece is empty, contains a space or an invisible character, or would not be
    kept as one piece."""
    proto = read_pieces_file(model)
    for piece in pieces:
        if not piece.strip(BLANK) or not piece.translate(JOINERS).isprintable() or " " in piece:
            raise DataError(
                f"{piece!r} cannot be a piece: expected text without spaces and without characters that cannot be seen; "
                f"write {BLANK} for a space"
            )
        proto.pieces.add(piece=piece, score=0.0, type=Kind.USER_DEFINED)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    with replacing(out) as temporary:
        temporary.write_bytes(proto.SerializeToString())
        tokenizer = Tokenizer.load(temporary)
        for piece in pieces:
            if piece not in (found := tokenizer.source_pieces(_ids(tokenizer, piece))):
                raise DataError(
                    f"{piece!r} cannot be a piece of this model: it would still be cut into {' '.join(found)}, since "
                    "another piece takes a part of it first. Give the longer one only, or spell it otherwise"
                )


def cuts(model: Path, pieces: Sequence[str]) -> list[list[int]]:
    """Returns the ids that the model cuts the text of each piece into, without unknown ones unless all are unknown.

    A leading blank is left out too if it is a piece of its own: sentencepiece adds it at the start of a sentence.
    """
    tokenizer = Tokenizer.load(model)
    unknown = {index for index, piece in enumerate(read_pieces_file(model).pieces) if piece.type == Kind.UNKNOWN}
    found = []
    for piece in pieces:
        ids = _ids(tokenizer, piece)
        is_apart = not piece.startswith(BLANK) and tokenizer.source_pieces(ids[:1]) == [BLANK]
        ids = ids[1:] if is_apart else ids
        found.append([index for index in ids if index not in unknown] or ids)
    return found


def num_pieces(model: Path) -> int:
    """Number of pieces of the model."""
    return len(read_pieces_file(model).pieces)


def _ids(tokenizer: Tokenizer, piece: str) -> list[int]:
    """Returns the ids of the text of a piece, without the end of sentence."""
    return tokenizer.encode_source([piece.replace(BLANK, " ")])[0][:-1]
