"""Guided alignment: a second loss, by which cross-attention learns to look at the source tokens that a target token comes from.

As Chen et al. (2016), "Guided Alignment Training for Topic-Aware Neural Machine Translation", and Marian: the cross-entropy
between an alignment and attention weights. The alignment is that of data/token_aligner.py, computed for each batch from
the run's lexicon; the weights are the mean over the heads of the last decoder layer but one, from which `translate --alignment`
reads words (`word_alignment` of decoding/translation_lines.py).

Axes: B batch, S source, T target, H heads; K as in data/token_aligner.py.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.token_aligner import NULL_SHARE, TENSION, Lexicon, Pair, train_aligner
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.model.attention import CrossAttention, batches_of
from dist_transformer.model.transformer import JoinedShape, Transformer
from dist_transformer.training.run import Run

SMALLEST_WEIGHT = 1e-6
"""Added to attention weights before their logarithm."""


class GuidedAlignment:
    """The second loss of a model, `weight` times the cross-entropy of each real target token."""

    def __init__(self, model: Transformer, lexicon: Lexicon, weight: float) -> None:
        self._weight, self._pad_id = weight, model.pad_id
        self._keys_K, self._probabilities_K, self._shares_V = (
            torch.from_numpy(array) for array in (lexicon.keys, lexicon.probabilities, lexicon.shares)
        )
        layers = model.decoder_layers
        attention = layers[max(0, len(layers) - 2)].cross_attention
        assert isinstance(attention, CrossAttention)
        self._attention = attention
        self._seen: tuple[Tensor, Tensor, Any] | None = None
        attention.register_forward_pre_hook(self._see, with_kwargs=True)

    def loss(self, source_BS: Tensor, target_BT: Tensor, shapes: Sequence[JoinedShape] | None) -> Tensor:
        """Returns the weighted sum over the real target tokens, for the batches of the forward pass just made; fp32."""
        assert self._seen is not None
        input_BTD, memory_BSD, joined = self._seen
        self._seen = None
        if shapes is None:
            return self._loss(input_BTD, memory_BSD, source_BS, target_BT)
        of_source, of_target = joined
        inputs, memories = of_target.split(input_BTD), of_source.split(memory_BSD)
        sources, targets = batches_of(source_BS, of_source.shapes), batches_of(target_BT, of_target.shapes)
        return torch.stack([*map(self._loss, inputs, memories, sources, targets)]).sum()

    def alignment(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Returns the probability (B, T, S) that a target token comes from a source token; rows sum to 1 at most."""
        for name in ("_keys_K", "_probabilities_K", "_shares_V"):
            setattr(self, name, getattr(self, name).to(source_BS.device))
        if not len(self._keys_K):
            return source_BS.new_zeros(*target_BT.shape, source_BS.shape[1], dtype=torch.float32)
        wanted_BTS = source_BS[:, None, :] * len(self._shares_V) + target_BT[:, :, None]
        place_BTS = torch.searchsorted(self._keys_K, wanted_BTS).clamp_(max=len(self._keys_K) - 1)
        is_known_BTS = self._keys_K[place_BTS] == wanted_BTS
        probability_BTS = torch.where(is_known_BTS, self._probabilities_K[place_BTS], 0.0)
        places_BS, places_BT = self._places(source_BS), self._places(target_BT)
        prior_BTS = torch.exp(-TENSION * (places_BS[:, None, :] - places_BT[:, :, None]).abs())
        prior_BTS = prior_BTS.masked_fill((source_BS == self._pad_id)[:, None, :], 0.0)
        joint_BTS = (1 - NULL_SHARE) * prior_BTS / prior_BTS.sum(-1, keepdim=True) * probability_BTS
        of_no_source_BT1 = NULL_SHARE * self._shares_V[target_BT][..., None]
        return joint_BTS / (joint_BTS.sum(-1, keepdim=True) + of_no_source_BT1).clamp_min(1e-30)

    def _places(self, token_BT: Tensor) -> Tensor:
        """Returns the middle of each position as a share of its sentence."""
        lengths_B1 = (token_BT != self._pad_id).sum(1, keepdim=True).clamp(min=1)  # 0: a lane without rows
        return (torch.arange(token_BT.shape[1], device=token_BT.device) + 0.5) / lengths_B1

    def _see(self, _module: CrossAttention, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1  # in a backward pass, by activation checkpointing
        if torch.is_grad_enabled() and not is_recomputed:
            self._seen = inputs[0], inputs[1], named.get("joined")

    def _loss(self, input_BTD: Tensor, memory_BSD: Tensor, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        padded_B11S = torch.zeros(source_BS.shape, device=source_BS.device).masked_fill_(
            source_BS == self._pad_id, float("-inf")
        )
        weights_BTS = self._attention.weights(input_BTD, memory_BSD, padded_B11S[:, None, None]).mean(1)
        aligned_BTS = self.alignment(source_BS, target_BT)
        of_tokens_BT = -(aligned_BTS * (weights_BTS + SMALLEST_WEIGHT).log()).sum(-1)
        return self._weight * of_tokens_BT.masked_fill(target_BT == self._pad_id, 0.0).sum()


def open_lexicon(run: Run) -> Lexicon:
    """Returns the lexicon of a run, which is made from the heads of its training corpora if it is not there (collective)."""
    path, manifest = run.run_dir.lexicon, run.data.manifest

    def make() -> None:
        if not path.is_file():
            train_aligner(_pairs(run.data.reader, len(manifest.training)), manifest.target_vocabulary).save(path)

    run_on_rank_zero(run.ranks, make, run.doing("aligning the tokens of the training text"))
    return Lexicon.load(path)


def _pairs(reader: RowReader, num_corpora: int) -> Iterator[Pair]:
    """Yields the pairs of the training corpora, a row group of each in turn."""
    corpora = map(reader.read_first_pass, range(num_corpora))
    for rows in chain.from_iterable(zip_longest(*corpora)):
        if rows is not None:
            sides = (np.split(side.ids.astype(np.int64), side.starts[1:]) for side in (rows.source, rows.target))
            yield from zip(*sides, strict=True)
