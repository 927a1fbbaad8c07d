"""Ids of the tokens that are no text, from the tokenizer and the manifest to the loader and the search."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that are no text, the same on both sides.

    Attributes:
        bos: the first token of every decoder input.
        eos: the end of every sentence.
        num_pieces: pieces of the target's tokenizer; ids from here on are rows without text. None: there are none.
    """

    bos: int
    eos: int
    pad: int
    num_pieces: int | None = None
