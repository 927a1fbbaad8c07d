"""The reference: the same model trained by torch alone, on the whole step at once."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.loader import loader
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.model.transformer import Transformer

TINY = ModelConfig(
    preset="tiny", d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0
)
VOCABULARY = 40
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Of losses over six steps, relative: float order, then the 8 and 11 bits of the two short formats."""

MicroBatch = tuple[Tensor, Tensor, Tensor]
"""Source, target as the decoder reads it, target."""
NOTHING: MicroBatch = (torch.full((1, 1), 2), torch.full((1, 1), 1), torch.zeros(1, 1, dtype=torch.long))
"""A micro-batch without a real target token."""


@dataclass
class PlainRun:
    """What training gave: losses per token and gradient norms by step, weights and their moving average at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)


def ragged_batches(count: int) -> list[MicroBatch]:
    """Micro-batches of different lengths, with padding at the end."""
    random = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        source = torch.randint(4, VOCABULARY, (4, 5 + index % 3), generator=random)
        target = torch.randint(4, VOCABULARY, (4, 7), generator=random)
        lengths = torch.randint(2, 8, (4, 1), generator=random)
        target = torch.where(torch.arange(7)[None] < lengths, target, 0)
        made.append((source, torch.cat([torch.ones(4, 1, dtype=torch.long), target[:, :-1]], 1), target))
    return made


def micro_batches_of(batches: list[MicroBatch]) -> list[loader.MicroBatch]:
    """The same as the loader hands them out."""
    made = []
    for source, target_in, target_out in batches:
        tokens = int((target_out != 0).sum())
        shape = BatchShape(len(source), source.shape[1], target_out.shape[1], len(source), source.numel(), tokens)
        made.append(loader.MicroBatch(0, shape, source, target_in, target_out, torch.arange(len(source))))
    return made


def tokens_of(micro_batches: list[MicroBatch]) -> int:
    """Real target tokens."""
    return sum(int((target != 0).sum()) for _, _, target in micro_batches)


def train_on_plain_torch(
    steps: list[list[MicroBatch]],
    learning_rate: float,
    clip_norm: float,
    frozen: tuple[str, ...] = (),
    decay: float = 0.0,
    config: ModelConfig = TINY,
) -> PlainRun:
    """Training with F.cross_entropy on full logits, torch.optim.Adam and the moving average as it is defined."""
    torch.manual_seed(0)
    model, run = Transformer(config, VOCABULARY, VOCABULARY, 0), PlainRun()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in frozen))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate, betas=(0.9, 0.98), eps=1e-9)
    run.average = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for number, micro_batches in enumerate(steps, start=1):
        optimizer.zero_grad()
        run.losses.append(sum(_backward(model, batch, tokens_of(micro_batches)) for batch in micro_batches))
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip_norm or float("inf"))))
        optimizer.step()
        run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        kept = min(decay, (1 + number) / (10 + number))
        run.average = {name: kept * old + (1 - kept) * run.weights[name] for name, old in run.average.items()}
    return run


def _backward(model: Transformer, micro_batch: MicroBatch, tokens: int) -> float:
    source, target_in, target = micro_batch
    logits = model(source, target_in).flatten(0, 1)
    loss = F.cross_entropy(logits, target.flatten(), ignore_index=0, label_smoothing=0.1, reduction="sum") / tokens
    loss.backward()
    return float(loss.detach())
