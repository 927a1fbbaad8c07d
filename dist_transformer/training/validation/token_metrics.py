"""Measures of the validation corpora on the reference, with their micro-batches distributed over the ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import WantsStop, failures_named, in_rounds
from dist_transformer.model.transformer import Shapes
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.memory import explaining_out_of_memory

LESS_MEMORY = (
    "Where memory was short, lower data.max_tokens, decoding.max_tokens or validation.beam_size, or set "
    "validation.translate=false"
)


@dataclass(frozen=True)
class ValidationSet:
    """A validation corpus, the same on every rank.

    Attributes:
        name: name in records; that of data.validation is "validation", whose measures have no prefix.
        batches: micro-batches of all of its text.
        sources, references: its first pairs, to be translated; without references no translation is scored.
    """

    name: str
    batches: Sequence[MicroBatch]
    sources: Sequence[str] = ()
    references: Sequence[str] = ()

    @property
    def prefix(self) -> str:
        """Prefix of the names of its measures."""
        return "" if self.name == "validation" else f"{self.name}/"


@dataclass(frozen=True)
class Translated:
    """The translations of a set's sources, and their scores: bleu, chrf, their signatures, perhaps plugin."""

    translations: Sequence[str]
    scores: dict[str, float | str] = field(default_factory=dict)


Progress = Callable[[], None]
Translate = Callable[[Sequence[ValidationSet], Progress], Iterator[Translated]]
"""Translates each set with the current weights, shared over the ranks, and scores it (collective); the same on every
rank. Progress is called at each advance. Raises Stopped and WorkFailed on every rank, as `in_rounds` does."""


def measure_tokens(
    engine: Engine, batches: Sequence[MicroBatch], ranks: Ranks, progress: Progress, wants_stop: WantsStop
) -> dict[str, float]:
    """Measures all of `batches` without dropout (collective); the same result on every rank: loss, nll and perplexity
    (means over the target tokens, natural logarithm), and the share of them that are the model's likeliest. The model
    receives the preceding reference tokens.

    Rank r takes the micro-batches r, r + W, ...; if W does not divide their number, some ranks compute one more that is
    not counted: ZeRO 3 needs the same number of forward passes on every rank. `progress` is called after each.

    Raises:
        Stopped, WorkFailed: on every rank, as `in_rounds` does. In ZeRO 3, whose passes are collectives, the rank that
            fails raises its error alone.
    """
    sums = torch.zeros(4, dtype=torch.float64)

    def measure(number: int) -> None:
        mine = number * ranks.num_ranks + ranks.rank
        batch = batches[min(mine, len(batches) - 1)]
        told = explaining_out_of_memory("the loss of a validation", ranks.device)
        with failures_named(ranks) if engine.has_full_weights else nullcontext(), told, torch.no_grad():
            sums_of_batch = engine(*_inputs([batch], ranks.device), True)
            found = torch.stack([value.double() for value in sums_of_batch]).tolist()  # one wait for the device
        if mine < len(batches):
            sums.add_(torch.tensor([*found, batch.shape.target_tokens], dtype=torch.float64))
        progress()

    engine.train(False)
    try:
        in_rounds(ranks, -(-len(batches) // ranks.num_ranks), measure, wants_stop)
    finally:
        engine.train()
    loss_sum, nll_sum, hits, tokens = ranks.all_reduce_sum(sums).tolist()
    nll = nll_sum / tokens
    perplexity = math.exp(min(nll, 700.0))
    return {"loss": loss_sum / tokens, "nll": nll, "perplexity": perplexity, "token_accuracy": hits / tokens}


def forward(
    engine: Callable[..., Any], batches: Sequence[MicroBatch], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, nll), each summed over the target tokens of the micro-batches, which are computed as one.
    `engine`: or the objective within it, which DeepSpeed then hears nothing of."""
    loss, nll = engine(*_inputs(batches, device))
    return loss, nll


def _inputs(batches: Sequence[MicroBatch], device: torch.device) -> tuple[torch.Tensor | Shapes | int | None, ...]:
    """Returns the arguments of an `Objective`: the sides on the device, with one copy for all of them, from page-locked
    memory, so that it is asynchronous; the number of target tokens; shapes if there are several micro-batches."""
    sides = [[getattr(batch, name) for batch in batches] for name in ("source_BS", "target_in_BT", "target_out_BT")]
    flat = torch.cat([tokens.flatten() for side in sides for tokens in side])
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    parts = torch.split(flat, [sum(tokens.numel() for tokens in side) for side in sides])
    num_targets = sum(batch.shape.target_tokens for batch in batches)
    if len(batches) == 1:
        return *(part.view_as(side[0]) for part, side in zip(parts, sides, strict=True)), num_targets, None
    return *parts, num_targets, [(*batch.source_BS.shape, batch.target_in_BT.shape[1]) for batch in batches]
