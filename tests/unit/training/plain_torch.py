"""The reference: the same model trained by torch alone, on the whole step at once."""

import torch
from torch.nn import functional as F

from dist_transformer.config.models import ModelConfig
from dist_transformer.model.transformer import Transformer

TINY = ModelConfig(
    preset="tiny", d_model=16, d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0
)
VOCABULARY = 40


def adam_on_plain_torch(
    config: ModelConfig, vocabulary: int, steps, learning_rate: float, clip_norm: float
) -> tuple[list[float], list[float]]:
    """Losses per token and gradient norms, with F.cross_entropy on full logits and torch.optim.Adam."""
    torch.manual_seed(0)
    model = Transformer(config, vocabulary, vocabulary, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-9)
    losses, norms = [], []
    for micro_batches in steps:
        tokens = sum(int((target != 0).sum()) for _, _, target in micro_batches)
        optimizer.zero_grad()
        total = 0.0
        for source, target_in, target in micro_batches:
            logits = model(source, target_in).flatten(0, 1)
            loss = (
                F.cross_entropy(logits, target.flatten(), ignore_index=0, label_smoothing=0.1, reduction="sum") / tokens
            )
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))))
        optimizer.step()
        losses.append(total)
    return losses, norms
