"""Translations drawn at random from the models' distribution, or from its likeliest part.

Each draw uses one number that depends only on (seed, line, sample, position) and selects the token whose share of
the cumulative probability contains it: so the results do not depend on the batch.

Axes: N sentences, K samples of each, B = N * K rows, C candidates, T tokens, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.beam import length_penalty
from dist_transformer.decoding.constraints import Constraints
from dist_transformer.decoding.ensemble import Ensemble
from dist_transformer.model.search_interface import Hypothesis, SearchInput


def draws(seed: int, sentence: int, sample: int, count: int) -> list[float]:
    """Random numbers in [0, 1) of the first `count` positions of one sample of one sentence."""
    drawn: list[float] = np.random.default_rng([seed, sentence, sample]).random(count).tolist()
    return drawn


def choose(logits_BV: Tensor, draw_B: Tensor, config: DecodingConfig) -> Tensor:
    """Token (B) of each row that its number in [0, 1) selects."""
    logits_BV = logits_BV.double()
    # Shifted so that the greatest is 0 and a temperature near 0 makes none infinite.
    below_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / config.temperature
    probability_BC, token_BC = _candidates(below_BV.softmax(-1), config)
    cumulative_BC = probability_BC.cumsum(1)
    # A number below 1 in fp64 times the total is below the total, so the chosen token has a probability above 0.
    reached_B1 = draw_B[:, None] * cumulative_BC[:, -1:]
    chosen_B1 = torch.searchsorted(cumulative_BC, reached_B1, right=True).clamp_(max=cumulative_BC.shape[1] - 1)
    return (chosen_B1 if token_BC is None else token_BC.gather(1, chosen_B1)).squeeze(1)


def _candidates(probability_BV: Tensor, config: DecodingConfig) -> tuple[Tensor, Tensor | None]:
    """Probabilities to draw from, and their tokens; None: all tokens, in order."""
    if config.top_k == 0 and config.top_p == 1:
        return probability_BV, None
    vocabulary = probability_BV.shape[1]
    probability_BC, token_BC = probability_BV.topk(min(config.top_k or vocabulary, vocabulary), dim=1)
    before_BC = probability_BC.cumsum(1) - probability_BC
    return probability_BC.masked_fill(before_BC >= config.top_p, 0.0), token_BC


class Sampling:
    """Draws `config.n_best` translations of each sentence of one batch independently, the likeliest first.

    Their log-probabilities are the models', whatever the temperature and the excluded tokens. A sentence leaves the
    batch when all its samples have ended.
    """

    def __init__(
        self, ensemble: Ensemble, constraints: Constraints, batch: Sequence[SearchInput], config: DecodingConfig
    ) -> None:
        self.ensemble, self.constraints, self.ids, self.config = ensemble, constraints, constraints.ids, config
        num_rows, device = len(batch) * config.n_best, ensemble.device
        drawn = [
            draws(config.seed, sentence.number, number, max(constraints.longest))
            for sentence in batch
            for number in range(config.n_best)
        ]
        self.draw_BT = torch.tensor(drawn, dtype=torch.float64, device=device)
        self.token_BT = torch.empty(num_rows, 0, dtype=torch.long, device=device)
        self.newest_B = torch.full((num_rows,), self.ids.bos, device=device)
        self.log_probability_B = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self.results: list[list[Hypothesis]] = [[] for _ in batch]
        self.input_position = list(range(len(batch)))

    @torch.no_grad()
    def run(self) -> list[list[Hypothesis]]:
        """Returns the translations of each sentence."""
        while self.input_position:
            self._step()
        return self.results

    def _step(self) -> None:
        """Draws one more token for each sample that has not ended."""
        log_probability_BV = self.ensemble.step(self.newest_B)
        self.constraints.apply(log_probability_BV, self.token_BT)
        has_ended_B = self.newest_B == self.ids.eos
        token_B = choose(log_probability_BV, self.draw_BT[:, self.token_BT.shape[1]], self.config)
        token_B = token_B.masked_fill(has_ended_B, self.ids.eos)
        chosen_B = log_probability_BV.gather(1, token_B[:, None]).squeeze(1)
        self.log_probability_B += chosen_B.masked_fill(has_ended_B, 0.0)
        token_B = token_B.masked_fill(self.log_probability_B.isnan(), self.ids.eos)  # else eos would never be drawn
        self.token_BT = torch.cat([self.token_BT, token_B[:, None]], 1)
        self.newest_B = token_B
        self._hand_in((token_B == self.ids.eos).view(-1, self.config.n_best).all(1))

    def _hand_in(self, done_N: Tensor) -> None:
        """Stores the results of done sentences, which leave the batch."""
        is_done = done_N.tolist()
        if not any(is_done):
            return
        rows, totals = self.token_BT.tolist(), self.log_probability_B.tolist()
        num_samples = self.config.n_best
        for sentence, position in enumerate(self.input_position):
            if is_done[sentence]:
                own = slice(sentence * num_samples, (sentence + 1) * num_samples)
                found = []
                for tokens, total in zip(rows[own], totals[own], strict=True):
                    length = tokens.index(self.ids.eos)
                    penalty = length_penalty(length + 1, self.config.length_penalty)
                    found.append(Hypothesis(tokens[:length], total / penalty, total))
                self.results[position] = sorted(found, key=lambda hypothesis: -hypothesis.score)
        kept = [sentence for sentence, done in enumerate(is_done) if not done]
        self.input_position = [self.input_position[sentence] for sentence in kept]
        kept_B = (~done_N).repeat_interleave(num_samples).nonzero().squeeze(1)
        self.ensemble.select(kept_B)
        self.constraints.select(kept)
        self.token_BT, self.newest_B = self.token_BT[kept_B], self.newest_B[kept_B]
        self.draw_BT, self.log_probability_B = self.draw_BT[kept_B], self.log_probability_B[kept_B]
