"""torch.nn.Transformer in a plain loop, with dropout where the paper has it and three-way tied embeddings."""

import torch
from loop import PAD_ID, read_task, train
from torch import Tensor, nn
from torch.nn import functional as F

MAX_POSITIONS = 512


class Network(nn.Module):
    """nn.Transformer between an embedding that is also the output projection."""

    def __init__(
        self, vocabulary: int, d_model: int, d_ff: int, num_heads: int, layers: tuple[int, int], dropout: float
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.network = nn.Transformer(d_model, num_heads, *layers, d_ff, dropout, batch_first=True)
        self.network.encoder.norm = self.network.decoder.norm = None  # the paper's post-norm stacks have no such norms
        for layer in (*self.network.encoder.layers, *self.network.decoder.layers):
            layer.dropout = nn.Identity()  # of the feed-forward network's inner activations
        for module in self.network.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        angles = torch.arange(MAX_POSITIONS)[:, None] / 10_000 ** (torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Logits, (batch, target length, vocabulary)."""
        is_padding, length = source == PAD_ID, target_in.shape[1]
        hidden = self.network(
            self._embed(source),
            self._embed(target_in),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            tgt_is_causal=True,
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
        )
        return F.linear(hidden, self.embedding.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        scaled = self.embedding(ids) * self.embedding.embedding_dim**0.5
        return self.dropout(scaled + self.positions[: ids.shape[1]])


def main() -> None:
    task = read_task()
    sizes = task["sizes"]
    layers = (sizes["num_encoder_layers"], sizes["num_decoder_layers"])
    model = Network(task["vocabulary"], sizes["d_model"], sizes["d_ff"], sizes["num_heads"], layers, sizes["dropout"])

    def loss_sum(source: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        logits = model(source, target_in).flatten(0, 1)
        options = {"ignore_index": PAD_ID, "label_smoothing": task["label_smoothing"], "reduction": "sum"}
        return F.cross_entropy(logits, target_out.flatten(), **options)

    train(task, model, loss_sum)


if __name__ == "__main__":
    main()
