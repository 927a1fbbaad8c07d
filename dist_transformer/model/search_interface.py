"""Inputs and results of a search, the same for every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.errors import UserError


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
    """Number of the line, from 0: random draws in sampling depend only on it and on the seed."""


def check_prefix(num_tokens: int, line: int, max_positions: int | None) -> None:
    """Raises a UserError that names the line (from 0) if its prefix leaves no position for the end of sentence."""
    if max_positions is not None and num_tokens + 1 > max_positions:
        raise UserError(
            f"line {line + 1}: its prefix has {num_tokens} tokens, but a translation of this model has at most "
            f"{max_positions - 1} (model.max_positions): give a shorter prefix"
        )


def longest_output(sentence: SearchInput, max_positions: int | None, config: DecodingConfig) -> int:
    """Tokens of the longest translation, eos included: the source's length plus `config.max_extra_tokens`, at least the
    prefix and eos, at most the positions of the models. Raises the UserError of `check_prefix`."""
    check_prefix(len(sentence.prefix), sentence.number, max_positions)
    longest = max(len(sentence.source) + config.max_extra_tokens, len(sentence.prefix) + 1)
    return longest if max_positions is None else min(longest, max_positions)


class Searcher(Protocol):
    """Finds translations of a batch of sentences, at least one; order and composition of the batch do not change a result."""

    max_positions: int | None
    """Longest source and translation in tokens; None: no limit."""

    def search(self, batch: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """Returns for each sentence at least one translation and at most `decoding.n_best`, best first."""
        ...


Engine = Literal["torch", "ctranslate2"]
