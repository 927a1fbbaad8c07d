"""Constraints on the next token: prefixes, n-grams that must not repeat, the longest output.

Axes: N sentences, B rows (grouped by sentence), T tokens so far, W n-grams, n tokens of one, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.model.search_interface import SearchInput, longest_output

IMPOSSIBLE = float("-inf")


class Constraints:
    """Constraints of each sentence of a batch."""

    def __init__(
        self, batch: Sequence[SearchInput], ids: SpecialTokens, max_positions: int | None, config: DecodingConfig
    ) -> None:
        """Raises UserError if a prefix leaves no position for the end of the translation."""
        self.rows_per_sentence, self.ids, self.ngram_size = config.rows_per_sentence, ids, config.no_repeat_ngram_size
        self.prefixes = [sentence.prefix for sentence in batch]
        self.longest = [longest_output(sentence, max_positions, config) for sentence in batch]

    def apply(self, value_BV: Tensor, token_BT: Tensor) -> None:
        """Sets forbidden tokens to -inf in place: bos, padding, ids without a piece, and those that break a constraint.
        The end of the sentence is forbidden only by a prefix, so at least one token is always left."""
        rows, tokens = self._forced(token_BT.shape[1])
        forced = torch.tensor([rows, tokens], device=value_BV.device).unbind() if rows else None
        kept_values = value_BV[forced] if forced else value_BV
        value_BV[:, self.ids.bos] = value_BV[:, self.ids.pad] = IMPOSSIBLE
        if self.ids.num_pieces is not None:
            value_BV[:, self.ids.num_pieces :] = IMPOSSIBLE
        if self.ngram_size:
            forbid_repeats(value_BV, token_BT, self.ngram_size)
        if forced:
            value_BV[forced[0]] = IMPOSSIBLE
            value_BV[forced] = kept_values

    def select(self, kept: Sequence[int]) -> None:
        """Keeps the given sentences, in the given order."""
        self.prefixes = [self.prefixes[sentence] for sentence in kept]
        self.longest = [self.longest[sentence] for sentence in kept]

    def _forced(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Rows whose next token after `num_tokens` tokens is forced, and these tokens."""
        rows: list[int] = []
        tokens: list[int] = []
        for sentence, (prefix, longest) in enumerate(zip(self.prefixes, self.longest, strict=True)):
            if num_tokens < len(prefix) or num_tokens + 1 == longest:
                first = sentence * self.rows_per_sentence
                rows += range(first, first + self.rows_per_sentence)
                token = prefix[num_tokens] if num_tokens < len(prefix) else self.ids.eos
                tokens += [token] * self.rows_per_sentence
        return rows, tokens


def forbid_repeats(value_BV: Tensor, token_BT: Tensor, ngram_size: int) -> None:
    """Sets to -inf in place every token that would end an n-gram that the row already has."""
    if token_BT.shape[1] < ngram_size:
        return
    ngram_BWn = token_BT.unfold(1, ngram_size, 1)
    newest_Bn = token_BT[:, token_BT.shape[1] - ngram_size + 1 :]
    repeats_BW = (ngram_BWn[..., :-1] == newest_Bn[:, None]).all(-1)
    limit_BW = torch.where(repeats_BW, IMPOSSIBLE, -IMPOSSIBLE).to(value_BV.dtype)
    value_BV.scatter_reduce_(1, ngram_BWn[..., -1], limit_BW, "amin")
