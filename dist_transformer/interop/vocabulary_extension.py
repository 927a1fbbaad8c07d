"""Rows of a model for new pieces of its tokenizer: the mean of the rows of the pieces a new one was cut into before.

A new piece then begins as the mean of its parts (Gee et al., 2022, "Fast Vocabulary Transfer").

rows of a vocabulary of 13 pieces, 3 of them new:   0 .. 9 as before | 10 11 12 means | 13 14 15 as padding, up to 16
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


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
