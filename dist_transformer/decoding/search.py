"""Our own search: one or several models that decode together, by beam search or sampling as configured.

Axes: B sentences, S source.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding.beam import BeamSearch
from dist_transformer.decoding.constraints import Constraints
from dist_transformer.decoding.ensemble import Ensemble
from dist_transformer.decoding.sampling import Sampling
from dist_transformer.errors import UserError
from dist_transformer.model.search_interface import Hypothesis, SearchInput
from dist_transformer.model.transformer import Transformer


class TorchSearcher:
    """A `Searcher` over models of this package; `max_positions` is the smallest of their limits."""

    def __init__(
        self, models: Sequence[Transformer], special: SpecialTokens, config: DecodingConfig, device: torch.device
    ) -> None:
        """Takes models with the same vocabularies, on `device` and in eval mode. Several are an ensemble: the search
        uses the logarithm of the mean of their probabilities."""
        assert models, "a search needs a model"
        self.models, self.config, self.device = models, config, device
        self.max_positions = min((m.max_positions for m in models if m.max_positions is not None), default=None)
        self.ids = special
        self.each_token: Callable[[], None] = lambda: None
        """Callback before each token of a batch; an exception from it ends the search."""

    @torch.inference_mode()
    def search(self, batch: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        """Translations as of any `Searcher`. Raises UserError: a prefix leaves no position for the end, or the scores are
        NaN."""
        constraints = Constraints(batch, self.ids, self.max_positions, self.config)
        source_BS = pad_together([sentence.source for sentence in batch], self.ids.pad).to(self.device)
        ensemble = Ensemble(self.models, source_BS, self.config.rows_per_sentence)
        ensemble.each_token = self.each_token
        if self.config.sampling:
            found = Sampling(ensemble, constraints, batch, self.config).run()
        else:
            found = BeamSearch(ensemble, constraints, self.config).run()
        # NaN cannot be compared: the search then finds nothing, or anything.
        if any(not hypotheses or any(math.isnan(each.score) for each in hypotheses) for hypotheses in found):
            raise UserError(
                "the search found a sentence without any translation whose score is a number: the model's weights are not "
                "finite, or it overflows in fp16. Take an older checkpoint or model, or another precision"
            )
        return found


def pad_together(sentences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Tensor (B, S) int64 with padding at the end."""
    longest = max(len(ids) for ids in sentences)
    return torch.tensor([[*ids, *[pad_id] * (longest - len(ids))] for ids in sentences])
