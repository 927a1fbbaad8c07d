"""A decoder-only Transformer: source and target are one sequence, the loss is on the target alone.

model: {plugin: "examples/decoder_only.py:build", preset: tiny}
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Pre-norm self-attention and feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.query_key_value, self.output = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(hidden)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class DecoderOnly(nn.Module):
    """Takes source (B, S) and target (B, T) ids, padded at the end; returns logits (B, T, vocabulary)."""

    def __init__(self, config, vocabulary: int, pad_id: int) -> None:
        super().__init__()
        self.pad_id, self.d_model, self.dropout = pad_id, config.d_model, nn.Dropout(config.dropout)
        self.embedding = nn.Embedding(vocabulary, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        sizes = config.d_model, config.d_ff, config.num_heads, config.dropout
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(config.num_decoder_layers))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        tokens = torch.cat([source, target], 1)
        is_real = tokens != self.pad_id
        each = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)  # itself: no row is without a key
        mask = (is_real[:, None] & torch.ones_like(each).tril() | each)[:, None]
        places = is_real.cumsum(1).unsqueeze(2)  # padding counts no place
        rates = 10_000.0 ** -(torch.arange(0, self.d_model, 2, device=tokens.device) / self.d_model)
        positions = torch.cat([torch.sin(places * rates), torch.cos(places * rates)], 2)
        hidden = self.embedding(tokens) * self.d_model**0.5
        hidden = self.dropout(hidden + positions.to(hidden.dtype))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return F.linear(self.norm(hidden[:, source.shape[1] :]), self.embedding.weight)


def build(config, source_vocabulary: int, target_vocabulary: int, pad_id: int) -> nn.Module:
    assert source_vocabulary == target_vocabulary, "one embedding for both sides needs tokenizer.shared: true"
    return DecoderOnly(config, target_vocabulary, pad_id)
