"""A network of the user's own in place of ours (`model.plugin`): its logits with our loss, and a search over them.

Axes: B batch, S source, T target, V vocabulary. The search computes the whole prefix again for every token, because a
network of which only `forward` is known has no cache: right for any network, and slow.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from dist_transformer.config.schema import ModelConfig
from dist_transformer.distributed.causes import explain
from dist_transformer.errors import DistTransformerError, UserError
from dist_transformer.model.transformer import JoinedShape, Transformer
from dist_transformer.plugins import Plugin, call, error_of

_OF_DEVICE = re.compile("out of memory|alloc|CUDA error|NCCL|CUBLAS_|CUDNN_")
"""Messages of errors that are not the network's own, but of memory, a device or a collective."""


@dataclass
class Prefixes:
    """The state of a search: source (B, S) and tokens (B, T) of every row."""

    source_BS: Tensor
    target_BT: Tensor

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows in the given order; rows may repeat."""
        self.source_BS, self.target_BT = self.source_BS[rows], self.target_BT[rows]

    reorder = select


class PluginTransformer(Transformer):
    """The network `network`, wherever a `Transformer` is trained, validated and searched with."""

    def __init__(self, plugin: Plugin, network: nn.Module, target_vocabulary: int, pad_id: int) -> None:
        nn.Module.__init__(self)  # none of the parts of ours
        self.plugin = plugin
        self.network, self.target_vocabulary, self.pad_id = network, target_vocabulary, pad_id
        self.encoder_layers, self.decoder_layers = nn.ModuleList(), nn.ModuleList()
        self.max_positions = None

    def round_layers(self, dtype: torch.dtype) -> None:
        """Rounds all weights: which of them are layers is not known."""
        self.network.to(dtype)

    def is_padded(self, shapes: Sequence[JoinedShape], source: Tensor) -> bool:
        return True

    def in_order_of_use(self) -> list[nn.Module]:
        return [self.network]

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        try:
            logits = self.network(source_BS.clone(), target_BT.clone())  # which it may change
        except (Exception, SystemExit) as error:
            is_told = isinstance(error, DistTransformerError | MemoryError | OSError)
            if is_told or explain(error) or _OF_DEVICE.search(str(error)):
                raise
            raise error_of(self.plugin, error) from error
        expected = f"a tensor of shape {(*target_BT.shape, self.target_vocabulary)}"
        found = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        if found == expected and not (logits.is_floating_point() and (logits.requires_grad or not self.training)):
            found += f" ({logits.dtype}, requires_grad={logits.requires_grad})"
        if found != expected:
            said = f"{self.plugin.key}: {self.plugin.name} of {self.plugin.file}: forward returned {found}, expected {expected}"
            raise UserError(f"{said} of floating point, in training with a gradient; mend the plug-in")
        return cast(Tensor, logits)

    def loss(  # as ours
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float,
        num_targets: int | None = None,
        shapes: Sequence[JoinedShape] | None = None,
        counts_hits: bool = False,
    ) -> tuple[Tensor, ...]:
        logits_NV, target_N = self(source_BS, target_in_BT).flatten(0, 1).float(), target_out_BT.flatten()
        about: dict[str, Any] = {"ignore_index": self.pad_id, "reduction": "sum"}
        loss = F.cross_entropy(logits_NV, target_N, label_smoothing=label_smoothing, **about)
        nll = F.cross_entropy(logits_NV.detach(), target_N, **about) if label_smoothing else loss.detach()
        if not counts_hits:
            return loss, nll
        return loss, nll, ((logits_NV.argmax(1) == target_N) & (target_N != self.pad_id)).sum()

    def encode(self, source_BS: Tensor) -> Tensor:
        return source_BS

    @torch.no_grad()
    def start_decoding(self, memory_BSD: Tensor, source_BS: Tensor, beam_size: int = 1) -> Any:
        rows_BS = source_BS.repeat_interleave(beam_size, 0)
        return Prefixes(rows_BS, rows_BS[:, :0])

    @torch.no_grad()
    def decode_step(self, token_B: Tensor, cache: Any) -> Tensor:
        cache.target_BT = torch.cat([cache.target_BT, token_B[:, None]], 1)
        logits_BTV: Tensor = self(cache.source_BS, cache.target_BT)
        return logits_BTV[:, -1]


def build_plugin(
    plugin: Plugin, config: ModelConfig, source_vocabulary: int, target_vocabulary: int, pad_id: int
) -> PluginTransformer:
    """Builds the network of a plug-in. UserError: its code raises, or it is no module that can be trained and resumed."""
    build = plugin.load()
    network = call(plugin, lambda: build(config, source_vocabulary, target_vocabulary, pad_id))
    problem = None
    if not isinstance(network, nn.Module):
        problem = f"returned {type(network).__name__}, expected a torch.nn.Module"
    elif not any(True for _ in network.parameters()):
        problem = "returned a module without parameters: there is nothing to train"
    elif odd := [n for n, p in network.named_parameters() if is_lazy(p) or p.is_complex() or not p.dim()]:
        problem = f"returned {', '.join(odd[:5])}, expected parameters of real numbers, with a dimension and a size (not lazy)"
    elif buffers := [name for name, _ in network.named_buffers()]:
        problem = f"returned buffers ({', '.join(buffers[:5])}), which are not saved: use parameters, or compute them in forward"
    if problem is not None:
        raise UserError(f"{plugin.key}: {plugin.name} of {plugin.file} {problem}")
    return PluginTransformer(plugin, network.float(), target_vocabulary, pad_id)
