"""What a search is asked and what it answers, whichever engine searches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Hypothesis:
    """One translation: token ids without bos and eos."""

    tokens: list[int]
    score: float
    """`log_probability` over the length penalty; the higher the better."""
    log_probability: float
    """Natural logarithm of the probability of the tokens and the eos after them."""


@dataclass(frozen=True)
class SearchInput:
    """One sentence to translate."""

    source: list[int]
    """Token ids, eos included."""
    prefix: list[int]
    """Token ids that every translation begins with; empty: any."""
    number: int
    """Of the line, from 0: what is drawn in sampling depends on it and on the seed alone."""


class Searcher(Protocol):
    """Finds translations of a batch of sentences; the order and the company of the sentences change nothing."""

    @property
    def max_positions(self) -> int | None:
        """Longest source and translation in tokens; None: any."""
        ...

    def search(self, batch: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """For each sentence at least one translation and at most `decoding.n_best`, best first."""
        ...
