"""Batched beam search on cached keys and values, as the paper's (6.1) in tensor2tensor.

Every step extends the `beam_size` live hypotheses of each sentence and looks at the 2 * beam_size likeliest extensions:
those that end join the finished ones, of which the best beam_size are kept, the best of the others live on. So at any
time beam_size hypotheses live, whatever has finished. A sentence is done when no live hypothesis can still beat the
worst kept finished one, or at its longest length, where only the end of sentence may follow; done sentences leave
the batch. With a beam of 1 it is greedy search: the sentence is done when its likeliest token is the end.

Axes: N sentences, K beam, C candidates, B = N * K rows, T generated tokens, S source, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_transformer.config.models import DecodingConfig
from dist_transformer.model.hypothesis import Hypothesis
from dist_transformer.model.transformer import DecodingCache, Transformer

IMPOSSIBLE = float("-inf")


@torch.no_grad()
def beam_search(
    model: Transformer, source_BS: Tensor, *, bos_id: int, eos_id: int, pad_id: int, config: DecodingConfig
) -> list[list[Hypothesis]]:
    """For each row of `source_BS`: its finished hypotheses, best first, at least one and at most `config.beam_size`.

    The longest output, eos included, is the source's length without padding plus `config.max_extra_tokens`, and no more
    than the model has positions.
    """
    assert not model.training, "dropout would make the search random: call model.eval() first"
    search = _Search(model, source_BS, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id, config=config)
    while search.num_sentences:
        search.step()
    return search.results


def length_penalty(num_tokens: Tensor | int, alpha: float) -> Tensor:
    """((5 + length) / 6) ** alpha, equation 14 of Wu et al. (2016); the length counts eos."""
    return ((5.0 + torch.as_tensor(num_tokens)) / 6.0) ** alpha


@dataclass
class _Finished:
    """The best finished hypotheses of each sentence so far, best first; score -inf where there are fewer than K."""

    score_NK: Tensor
    log_probability_NK: Tensor
    token_NKT: Tensor
    """eos included, then padding."""

    def merge(self, newer: "_Finished") -> None:
        """Keeps the best K of both."""
        num_kept = self.score_NK.shape[1]
        score_NC = torch.cat([self.score_NK, newer.score_NK], 1)
        self.score_NK, chosen_NK = score_NC.topk(num_kept, dim=1)
        both_NC = torch.cat([self.log_probability_NK, newer.log_probability_NK], 1)
        self.log_probability_NK = both_NC.gather(1, chosen_NK)
        self.token_NKT = _gather_rows(torch.cat([self.token_NKT, newer.token_NKT], 1), chosen_NK)

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


class _Search:
    """The state of one batch: live hypotheses as rows of the cache, finished ones, and results by input position."""

    def __init__(
        self, model: Transformer, source_BS: Tensor, *, bos_id: int, eos_id: int, pad_id: int, config: DecodingConfig
    ) -> None:
        num_sentences, beam_size, device = len(source_BS), config.beam_size, source_BS.device
        self.model, self.eos_id, self.pad_id, self.config = model, eos_id, pad_id, config
        self.forbidden_ids = torch.tensor([pad_id, bos_id], device=device)
        self.cache: DecodingCache = model.start_decoding(model.encode(source_BS), source_BS, beam_size)
        self.longest_N = (source_BS != pad_id).sum(1) + config.max_extra_tokens
        if model.max_positions is not None:
            self.longest_N.clamp_(max=model.max_positions)
        self.length = 0
        self.live_token_NKT = torch.empty(num_sentences, beam_size, 0, dtype=torch.long, device=device)
        # All rows of a sentence begin alike: only the first counts until the first step tells them apart.
        self.live_NK = torch.full((num_sentences, beam_size), IMPOSSIBLE, device=device)
        self.live_NK[:, 0] = 0.0
        self.newest_B = torch.full((num_sentences * beam_size,), bos_id, device=device)
        none_NK = torch.full((num_sentences, beam_size), IMPOSSIBLE, device=device)
        self.finished = _Finished(none_NK, none_NK, self.live_token_NKT)
        self.results: list[list[Hypothesis]] = [[] for _ in range(num_sentences)]
        self.input_position = list(range(num_sentences))

    @property
    def num_sentences(self) -> int:
        return len(self.input_position)

    def step(self) -> None:
        """Decodes one more token of every live hypothesis."""
        log_probability_BV = self._next_log_probabilities()
        self.length += 1
        parent_NC, token_NC, candidate_NC = self._candidates(log_probability_BV)
        candidate_NCT = torch.cat([_gather_rows(self.live_token_NKT, parent_NC), token_NC[..., None]], 2)
        ends_NC = token_NC == self.eos_id
        self._finish(candidate_NC.masked_fill(~ends_NC, IMPOSSIBLE), candidate_NCT)
        self.live_NK, chosen_NK = candidate_NC.masked_fill(ends_NC, IMPOSSIBLE).topk(self.config.beam_size, dim=1)
        self.live_token_NKT = _gather_rows(candidate_NCT, chosen_NK)
        self._go_on(parent_NC.gather(1, chosen_NK), self._is_done())

    def _next_log_probabilities(self) -> Tensor:
        """(N, K, V) in fp32; bos and padding are impossible, and at the longest length all but eos."""
        logits_BV = self.model.decode_step(self.newest_B, self.cache)
        log_probability_BV = logits_BV.float().log_softmax(-1)
        log_probability_BV[:, self.forbidden_ids] = IMPOSSIBLE
        must_end_B = (self.longest_N == self.length + 1).repeat_interleave(self.config.beam_size)
        eos_B = log_probability_BV[:, self.eos_id].clone()
        log_probability_BV.masked_fill_(must_end_B[:, None], IMPOSSIBLE)
        log_probability_BV[:, self.eos_id] = eos_B
        return log_probability_BV.view(*self.live_NK.shape, -1)

    def _candidates(self, log_probability_NKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(parent's place in the beam, token, log-probability) of the likeliest extensions, (N, C) each.

        Of 2 K extensions at most K end, so K can live on. In greedy search the one likeliest extension decides.
        """
        num_sentences, beam_size, vocabulary = log_probability_NKV.shape
        num_candidates = 1 if beam_size == 1 else min(2 * beam_size, beam_size * vocabulary)
        extended_NX = (self.live_NK[..., None] + log_probability_NKV).view(num_sentences, -1)
        candidate_NC, index_NC = extended_NX.topk(num_candidates, dim=1)
        return index_NC // vocabulary, index_NC % vocabulary, candidate_NC

    def _finish(self, log_probability_NC: Tensor, token_NCT: Tensor) -> None:
        penalty = length_penalty(self.length, self.config.length_penalty).to(log_probability_NC)
        self.finished.token_NKT = torch.nn.functional.pad(self.finished.token_NKT, (0, 1), value=self.pad_id)
        self.finished.merge(_Finished(log_probability_NC / penalty, log_probability_NC, token_NCT))

    def _is_done(self) -> Tensor:
        """Per sentence. A live hypothesis can at best keep its probability and grow to the longest length."""
        best_possible_N = self.live_NK[:, 0] / length_penalty(self.longest_N, self.config.length_penalty)
        return (best_possible_N <= self.finished.score_NK[:, -1]) | (self.longest_N == self.length)

    def _go_on(self, parent_NK: Tensor, done_N: Tensor) -> None:
        """Hands in the results of done sentences; rows of the others continue from their parents."""
        beam_size = self.config.beam_size
        row_NK = parent_NK + beam_size * torch.arange(self.num_sentences, device=parent_NK.device)[:, None]
        is_done = done_N.tolist()
        if not any(is_done):
            if beam_size > 1:
                self.cache.reorder(row_NK.flatten())
        else:
            for sentence, position in enumerate(self.input_position):
                if is_done[sentence]:
                    self.results[position] = self.finished.hypotheses(sentence, self.eos_id)
            self.input_position = [p for p, done in zip(self.input_position, is_done, strict=True) if not done]
            kept = (~done_N).nonzero().squeeze(1)
            self.cache.select(row_NK[kept].flatten())
            self.finished.select(kept)
            self.longest_N, self.live_NK = self.longest_N[kept], self.live_NK[kept]
            self.live_token_NKT = self.live_token_NKT[kept]
        self.newest_B = self.live_token_NKT[..., -1].flatten()


def _gather_rows(token_NKT: Tensor, chosen_NC: Tensor) -> Tensor:
    """Rows `chosen_NC` of the second axis: (N, C, T)."""
    return token_NKT.gather(1, chosen_NC[..., None].expand(-1, -1, token_NKT.shape[2]))
