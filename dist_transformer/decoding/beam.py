"""Batched beam search on cached keys and values, like the paper's (6.1) in tensor2tensor.

Every step extends the `beam_size` live hypotheses of each sentence and looks at the 2 * beam_size likeliest extensions:
those that end and are among the beam_size likeliest join the finished ones, the best of the others stay live. So
beam_size hypotheses are always live, however many have finished. (tensor2tensor lets all of the 2 * beam_size end,
which finds more translations that stop too early; fairseq, Hugging Face and CTranslate2 work as this search does.) A
sentence is done when no live hypothesis can still enter the n_best finished ones, or at its longest length, where only
the end of sentence may follow; done sentences leave the batch. With a beam of 1 this is greedy search: the sentence is
done when its likeliest token is the end.

Axes: N sentences, K beam, C candidates, B = N * K rows, T generated tokens, G groups, g members of one, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.constraints import IMPOSSIBLE, Constraints
from dist_transformer.decoding.ensemble import Ensemble
from dist_transformer.model.search_interface import Hypothesis

GROUP = 128
"""Tokens in a group, of which `likeliest` first compares only the greatest."""
FEW_ROWS = 8
"""Rows below which the operations on groups take longer than sorting."""


def length_penalty(num_tokens: int, alpha: float) -> float:
    """Returns ((5 + length) / 6) ** alpha, equation 14 of Wu et al. (2016); the length counts eos."""
    return math.pow((5.0 + num_tokens) / 6.0, alpha)


def likeliest(value_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest values of each row and their indices, like `topk`, which is several times slower on CPUs.
    The greatest values of a row lie in the groups with the greatest maxima."""
    vocabulary = value_BV.shape[1]
    num_groups = vocabulary // GROUP
    if value_BV.is_cuda or len(value_BV) < FEW_ROWS or num_groups <= count:
        return value_BV.max(1, keepdim=True) if count == 1 else value_BV.topk(count, dim=1)
    grouped_BV, rest_BV = torch.split(value_BV, [num_groups * GROUP, vocabulary % GROUP], dim=1)
    grouped_BGg = grouped_BV.view(-1, num_groups, GROUP)
    group_BC = grouped_BGg.amax(2).topk(count, dim=1).indices
    member_BCg = grouped_BGg.gather(1, group_BC[..., None].expand(-1, -1, GROUP))
    value_BC, found_BC = torch.cat([member_BCg.flatten(1), rest_BV], 1).topk(count, dim=1)
    is_grouped_BC = found_BC < count * GROUP
    place_BC = group_BC.gather(1, (found_BC // GROUP).clamp(max=count - 1)) * GROUP + found_BC % GROUP
    return value_BC, torch.where(is_grouped_BC, place_BC, found_BC + (num_groups - count) * GROUP)


@dataclass
class _Finished:
    """The best finished hypotheses of each sentence so far, best first; score -inf if there are fewer than K."""

    score_NK: Tensor
    log_probability_NK: Tensor
    token_NKT: Tensor
    """Tokens including eos, then padding."""

    def merge(self, newer: "_Finished") -> None:
        """Keeps the best K of both."""
        self.score_NK, chosen_NK = torch.cat([self.score_NK, newer.score_NK], 1).topk(self.score_NK.shape[1], dim=1)
        self.log_probability_NK = torch.cat([self.log_probability_NK, newer.log_probability_NK], 1).gather(1, chosen_NK)
        self.token_NKT = torch.cat([self.token_NKT, newer.token_NKT], 1).take_along_dim(chosen_NK[..., None], 1)

    def select(self, sentences: Tensor) -> None:
        self.score_NK, self.log_probability_NK = self.score_NK[sentences], self.log_probability_NK[sentences]
        self.token_NKT = self.token_NKT[sentences]

    def hypotheses(self, sentence: int, eos_id: int) -> list[Hypothesis]:
        scores, log_probabilities = self.score_NK[sentence].tolist(), self.log_probability_NK[sentence].tolist()
        rows = self.token_NKT[sentence].tolist()
        return [
            Hypothesis(tokens[: tokens.index(eos_id)], score, log_probability)
            for tokens, score, log_probability in zip(rows, scores, log_probabilities, strict=True)
            if score > IMPOSSIBLE
        ]


class BeamSearch:
    """The search of one batch: live hypotheses as rows of the cache, finished ones, and results by input position."""

    def __init__(self, ensemble: Ensemble, constraints: Constraints, config: DecodingConfig) -> None:
        """`ensemble` and `constraints` belong to the same sentences, with `config.beam_size` rows each."""
        num_sentences, beam_size, device = len(constraints.longest), config.beam_size, ensemble.device
        self.ensemble, self.constraints, self.ids, self.config = ensemble, constraints, constraints.ids, config
        self.longest_N = torch.tensor(constraints.longest, device=device)
        penalties = [length_penalty(longest, config.length_penalty) for longest in constraints.longest]
        self.longest_penalty_N = torch.tensor(penalties, device=device)
        self.length = 0
        self.live_token_NKT = torch.empty(num_sentences, beam_size, 0, dtype=torch.long, device=device)
        # All rows of a sentence begin equal: only the first counts until the first step makes them differ.
        self.live_NK = torch.full((num_sentences, beam_size), IMPOSSIBLE, device=device)
        self.live_NK[:, 0] = 0.0
        self.newest_B = torch.full((num_sentences * beam_size,), self.ids.bos, device=device)
        none_NK = torch.full((num_sentences, config.n_best), IMPOSSIBLE, device=device)
        self.finished = _Finished(none_NK, none_NK, self.live_token_NKT[:, : config.n_best])
        self.results: list[list[Hypothesis]] = [[] for _ in range(num_sentences)]
        self.input_position = list(range(num_sentences))

    def run(self) -> list[list[Hypothesis]]:
        """Finished hypotheses of each sentence, best first, at least one and at most `config.n_best`."""
        while self.input_position:
            self._step()
        return self.results

    def _step(self) -> None:
        parent_NC, token_NC, candidate_NC = self._candidates()
        self.length += 1
        parent_NCT = self.live_token_NKT.take_along_dim(parent_NC[..., None], 1)
        candidate_NCT = torch.cat([parent_NCT, token_NC[..., None]], 2)
        ends_NC = token_NC == self.ids.eos
        self._finish(*(of_all[:, : self.config.beam_size] for of_all in (candidate_NC, ends_NC, candidate_NCT)))
        self.live_NK, chosen_NK = candidate_NC.masked_fill(ends_NC, IMPOSSIBLE).topk(self.config.beam_size, dim=1)
        self.live_token_NKT = candidate_NCT.take_along_dim(chosen_NK[..., None], 1)
        parent_NK, is_done = parent_NC.gather(1, chosen_NK), self._is_done().tolist()
        if any(is_done):
            self._hand_in(self._rows(parent_NK), is_done)
        elif self.config.beam_size > 1:  # rows continue from their parents
            self.ensemble.reorder(self._rows(parent_NK).flatten())
        self.newest_B = self.live_token_NKT[..., -1].flatten()

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parent's place in the beam, token and log-probability of the likeliest extensions, (N, C) each. Of 2 K
        extensions at most K end, so K can stay live. In greedy search the one likeliest extension decides."""
        beam_size = self.config.beam_size
        log_probability_BV = self.ensemble.step(self.newest_B)
        self.constraints.apply(log_probability_BV, self.live_token_NKT.flatten(0, 1))
        of_each_row = 1 if beam_size == 1 else min(2 * beam_size, log_probability_BV.shape[1])
        value_BC, token_BC = likeliest(log_probability_BV, of_each_row)
        extended_NX = (self.live_NK.view(-1, 1) + value_BC).view(len(self.live_NK), -1)
        candidate_NC, index_NC = extended_NX.topk(min(2 * beam_size, extended_NX.shape[1]), dim=1)
        return index_NC // of_each_row, token_BC.view(len(self.live_NK), -1).gather(1, index_NC), candidate_NC

    def _finish(self, log_probability_NK: Tensor, ends_NK: Tensor, token_NKT: Tensor) -> None:
        if not ends_NK.any():
            return
        log_probability_NK = log_probability_NK.masked_fill(~ends_NK, IMPOSSIBLE)
        penalty = length_penalty(self.length, self.config.length_penalty)
        num_more = self.length - self.finished.token_NKT.shape[2]
        self.finished.token_NKT = torch.nn.functional.pad(self.finished.token_NKT, (0, num_more), value=self.ids.pad)
        self.finished.merge(_Finished(log_probability_NK / penalty, log_probability_NK, token_NKT))

    def _is_done(self) -> Tensor:
        """True (N) for done sentences. At best a live hypothesis keeps its probability up to the longest length."""
        best_possible_N = self.live_NK[:, 0] / self.longest_penalty_N
        return (best_possible_N <= self.finished.score_NK[:, -1]) | (self.longest_N == self.length)

    def _rows(self, parent_NK: Tensor) -> Tensor:
        """Converts places in the beam to rows of the cache."""
        return parent_NK + self.config.beam_size * torch.arange(len(parent_NK), device=parent_NK.device)[:, None]

    def _hand_in(self, row_NK: Tensor, is_done: list[bool]) -> None:
        for sentence, position in enumerate(self.input_position):
            if is_done[sentence]:
                self.results[position] = self.finished.hypotheses(sentence, self.ids.eos)
        kept = [sentence for sentence, done in enumerate(is_done) if not done]
        self.input_position = [self.input_position[sentence] for sentence in kept]
        if not kept:
            return
        kept_N = torch.tensor(kept, device=row_NK.device)
        self.ensemble.select(row_NK[kept_N].flatten())
        self.constraints.select(kept)
        self.finished.select(kept_N)
        self.longest_N, self.longest_penalty_N = self.longest_N[kept_N], self.longest_penalty_N[kept_N]
        self.live_NK = self.live_NK[kept_N]
        self.live_token_NKT = self.live_token_NKT[kept_N]
