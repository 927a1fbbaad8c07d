"""Extension of a model's vocabulary: new pieces at the end of a sentencepiece model, and rows for them in the weights.

docs/finetuning.md says what a new piece matches, and how its row begins.

rows of a vocabulary of 13 pieces, 3 of them new:   0 .. 9 as before | 10 11 12 means | 13 14 15 as padding, up to 16
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dist_transformer.data.tokenizer.model_file import BLANK, Kind, read_pieces_file, texts
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import DataError
from dist_transformer.files import replacing

JOINERS = {0x200C: None, 0x200D: None}
"""Invisible characters that the spelling of some scripts needs."""


@dataclass(frozen=True)
class Growth:
    """Change of the rows of one vocabulary.

    Attributes:
        num_pieces: pieces before; rows after them are unused, except perhaps one for padding.
        cuts: for each new piece the ids it was cut into.
        vocabulary: rows after the extension, a multiple of 8.
        pad_id: the row of padding before.
    """

    num_pieces: int
    cuts: Sequence[Sequence[int]]
    vocabulary: int
    pad_id: int


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


def growth_of(model: Path, pieces: Sequence[str], vocabulary: int, pad_id: int) -> Growth:
    """Returns the growth by `pieces`, with the ids that the model cuts the text of each into, without unknown ones unless
    all are unknown.

    A leading blank is left out too if it is a piece of its own: sentencepiece adds it at the start of a sentence.
    """
    tokenizer, there = Tokenizer.load(model), read_pieces_file(model).pieces
    unknown = {index for index, piece in enumerate(there) if piece.type == Kind.UNKNOWN}
    found = []
    for piece in pieces:
        ids = _ids(tokenizer, piece)
        is_apart = not piece.startswith(BLANK) and tokenizer.source_pieces(ids[:1]) == [BLANK]
        ids = ids[1:] if is_apart else ids
        found.append([index for index in ids if index not in unknown] or ids)
    return Growth(len(there), found, vocabulary, pad_id)


def _ids(tokenizer: Tokenizer, piece: str) -> list[int]:
    """Returns the ids of the text of a piece, without the end of sentence."""
    return tokenizer.encode_source([piece.replace(BLANK, " ")])[0][:-1]


def extended_weights(
    weights: Mapping[str, Tensor], source: Growth, target: Growth, shared_embeddings: bool
) -> dict[str, Tensor]:
    """The weights of a model by name, with the rows of both vocabularies extended; the others are the same tensors.

    If both sides share a matrix, its means are over the cuts of both.
    """
    if shared_embeddings:
        both = [[*a, *b] for a, b in zip(source.cuts, target.cuts, strict=True)]
        source = target = Growth(source.num_pieces, both, source.vocabulary, source.pad_id)
    of_target = ("target_embedding.weight", "output.weight", "output_bias")
    growth = {"source_embedding.weight": source, **dict.fromkeys(of_target, target)}
    return {name: extended(tensor, growth[name]) if name in growth else tensor for name, tensor in weights.items()}


def extended(rows: Tensor, growth: Growth) -> Tensor:
    """The rows (V, ...) of a vocabulary after its extension.

    Rows without a piece are copies of the padding row: like it they are never a target, so that the model makes them
    as unlikely.
    """
    grown = rows[growth.pad_id].repeat(growth.vocabulary, *[1] * (rows.dim() - 1))
    grown[: growth.num_pieces] = rows[: growth.num_pieces]
    for index, cut in enumerate(growth.cuts, start=growth.num_pieces):
        grown[index] = rows[list(cut)].mean(dim=0)
    return grown
