"""Reading and rewriting the pieces of a sentencepiece model file: their texts, ids and kinds.

The file is a protocol buffer. An id is the index in its list of pieces, so another order is another numbering; how a
text is cut depends only on the texts, scores and kinds of the pieces.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from dist_transformer.data.tokenizer.tokenizer import NO_MODEL
from dist_transformer.errors import DataError
from dist_transformer.files import MISPLACED, patiently

BLANK = "\u2581"
"""Character for a space in a piece."""
Kind = sentencepiece_model_pb2.ModelProto.SentencePiece


@dataclass(frozen=True)
class SpecialPieces:
    """Names of the special pieces; `begin` may be `padding`."""

    unknown: str
    begin: str
    end: str
    padding: str


def read_pieces_file(path: Path) -> Any:
    """Reads the ModelProto of a sentencepiece model. DataError if the file is missing or something else."""
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(patiently(path, path.read_bytes, MISPLACED))
    except OSError as error:
        raise DataError(f"{path}: {str(error.strerror).lower()}, expected a sentencepiece model.") from error
    except DecodeError as error:
        raise DataError(f"{path}: {NO_MODEL}") from error
    if not proto.pieces or not all(isinstance(text, str) for text in texts(proto)):  # bytes: no UTF-8
        raise DataError(f"{path}: {NO_MODEL}")
    return proto


def texts(proto: Any) -> list[str]:
    """Returns the text of each piece, by id."""
    return [piece.piece for piece in proto.pieces]


def names_of_rows(pieces: list[str], rows: int, pad_id: int) -> list[str]:
    """Returns a name for each row of a model: those after the last piece have no text."""
    padding = -1 if "<pad>" in pieces else pad_id  # such a piece may be text: no two rows have one name
    return pieces + ["<pad>" if number == padding else f"<unused_{number}>" for number in range(len(pieces), rows)]


def produced(proto: Any) -> list[str]:
    """Returns the pieces that a text can be cut into."""
    return [piece.piece for piece in proto.pieces if piece.type in (Kind.NORMAL, Kind.USER_DEFINED, Kind.BYTE)]


def renumbered(proto: Any, pieces: Sequence[str], special: SpecialPieces, whole: Iterable[str]) -> bytes:
    """Returns the file content of a model that cuts text as `proto` does, but with the ids of `pieces`.

    Pieces that are also in `whole` are kept as one piece at any place of a text. Pieces that `proto` lacks only
    complete the numbering: no text is cut into them. `pieces` has every piece that `proto` produces.
    """
    ours = {piece.piece: piece for piece in proto.pieces}
    always = set(whole)
    new = sentencepiece_model_pb2.ModelProto()
    new.CopyFrom(proto)
    new.ClearField("self_test_data")
    del new.pieces[:]
    for text in pieces:
        score = ours[text].score if text in ours else 0.0
        kind = Kind.USER_DEFINED if text in always else _kind(proto, text, ours.get(text), special)
        new.pieces.add(piece=text, score=score, type=kind)
    names = {"unk": special.unknown, "bos": special.begin, "eos": special.end, "pad": special.padding}
    for name, text in names.items():
        setattr(new.trainer_spec, f"{name}_piece", text)
        setattr(new.trainer_spec, f"{name}_id", pieces.index(text))
    new.trainer_spec.vocab_size = len(pieces)
    return bytes(new.SerializeToString())


def with_rows(proto: Any, rows: int) -> bytes:
    """Returns the content of a file with `rows` pieces: no text is cut into those after the model's own."""
    if rows == len(proto.pieces):
        return bytes(proto.SerializeToString())
    trainer, numbers = proto.trainer_spec, range(len(proto.pieces), rows)
    padding = trainer.pad_piece if trainer.pad_id >= 0 else trainer.bos_piece
    special = SpecialPieces(trainer.unk_piece, trainer.bos_piece, trainer.eos_piece, padding)
    return renumbered(proto, [*texts(proto), *(f"<unused_{number}>" for number in numbers)], special, ())


def ending_with_padding(content: bytes) -> bytes:
    """Returns the content of a file of the same model whose sentences end with padding, which is to say with nothing."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(content)
    trainer = proto.trainer_spec
    trainer.eos_piece, trainer.eos_id = trainer.pad_piece, trainer.pad_id
    return bytes(proto.SerializeToString())


def without(proto: Any, left_out: Iterable[str]) -> bytes:
    """Returns the content of a file without these pieces; the ids after them decrease."""
    gone = set(left_out)
    kept = [piece for piece in proto.pieces if piece.piece not in gone]
    new = sentencepiece_model_pb2.ModelProto()
    new.CopyFrom(proto)
    new.ClearField("self_test_data")
    del new.pieces[:]
    new.pieces.extend(kept)
    new.trainer_spec.vocab_size = len(kept)
    return bytes(new.SerializeToString())


def never_produced(proto: Any) -> list[str]:
    """Returns the pieces that no text is cut into and that are not special: those that `renumbered` had to add."""
    trainer = proto.trainer_spec
    special = {trainer.unk_piece, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece}
    kinds = (Kind.UNUSED, Kind.CONTROL)
    return [piece.piece for piece in proto.pieces if piece.type in kinds and piece.piece not in special]


def _kind(proto: Any, text: str, piece: Any, special: SpecialPieces) -> int:
    if text == special.unknown:
        return int(Kind.UNKNOWN)
    if text in (special.begin, special.end, special.padding):
        return int(Kind.CONTROL)
    if piece is not None:
        return int(Kind.CONTROL if piece.type == Kind.UNKNOWN else piece.type)
    # In a BPE model an unused piece is merged and then split again, which would change other merges.
    is_bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
    return int(Kind.CONTROL if is_bpe else Kind.UNUSED)
