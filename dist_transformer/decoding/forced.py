"""Forced decoding: probabilities of a given translation, in one pass over all positions.

Axes: B sentences, S source, T target, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_transformer.decoding.ensemble import log_probabilities
from dist_transformer.model.transformer import Transformer

CHUNK_TOKENS = 1024
"""Target tokens, padding counted, whose logits exist at once: 152 MB of fp32 for 37,000 pieces."""


@torch.no_grad()
def forced_log_probabilities(
    models: Sequence[Transformer], source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor
) -> Tensor:
    """Natural logarithm of the probability of each token of `target_out_BT`; fp32 (B, T), 0 at padding.

    `target_in_BT` is the decoder's input: bos, then `target_out_BT` without its last token. The sum over a sentence is
    the `log_probability` of the same translation in a search. With several models the mean of their probabilities
    counts. All are in eval mode and on the device of the ids.
    """
    assert not any(model.training for model in models), "dropout would make the scores random: call eval() first"
    rows = max(1, CHUNK_TOKENS // target_in_BT.shape[1])
    chunks = zip(*(torch.split(ids, rows) for ids in (source_BS, target_in_BT, target_out_BT)), strict=True)
    return torch.cat([_chunk(models, *chunk) for chunk in chunks]).float()


def _chunk(models: Sequence[Transformer], source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor) -> Tensor:
    log_probability_BTV = log_probabilities([model(source_BS, target_in_BT) for model in models])
    chosen_BT = log_probability_BTV.gather(2, target_out_BT[..., None]).squeeze(2)
    return chosen_BT.masked_fill(target_out_BT == models[0].pad_id, 0.0)
