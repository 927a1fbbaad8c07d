"""Several models that decode the same batch together as one model: the mean of their probabilities.

Axes: B rows, M models, V vocabulary, S source.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist_transformer.model.transformer import Transformer


class Ensemble:
    """The caches of all models for one batch. A single model gives bitwise the same results as on its own."""

    def __init__(self, models: Sequence[Transformer], source_BS: Tensor, rows_per_sentence: int) -> None:
        """Takes models that share vocabularies, in eval mode on the device of `source_BS`."""
        assert not any(model.training for model in models), "dropout would make the search random: call eval() first"
        self.models, self.device = models, source_BS.device
        self.each_token: Callable[[], None] = lambda: None  # called before each step
        self.caches = [model.start_decoding(model.encode(source_BS), source_BS, rows_per_sentence) for model in models]

    def step(self, newest_B: Tensor) -> Tensor:
        """Log-probabilities (B, V), fp32 at least, of the token after `newest_B`, which is added to the caches."""
        self.each_token()
        logits = [model.decode_step(newest_B, cache) for model, cache in zip(self.models, self.caches, strict=True)]
        return log_probabilities(logits)

    def reorder(self, rows: Tensor) -> None:
        """Lets row i continue from row `rows[i]` of the same sentence."""
        for cache in self.caches:
            cache.reorder(rows)

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows in the given order: whole sentences."""
        for cache in self.caches:
            cache.select(rows)


def log_probabilities(logits_of_models: Sequence[Tensor]) -> Tensor:
    """Natural logarithms (..., V) of the models' mean probability; fp32 at least. Without gradients they may overwrite
    the logits, which saves a CPU the time of another tensor of that size."""
    wide = [logits if logits.dtype == torch.float64 else logits.float() for logits in logits_of_models]
    each = [torch.log_softmax(logits, -1, out=logits) for logits in wide]
    return each[0] if len(each) == 1 else torch.stack(each).logsumexp(0) - math.log(len(each))
