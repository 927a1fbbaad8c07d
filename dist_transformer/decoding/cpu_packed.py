"""A model whose matrices are laid out for the CPU once, instead of in every product: the same numbers, faster.

Decoding consists of small products, dominated by reading the matrix. PyTorch's usual library does them up to twice as
fast with the matrix stored input by input. For larger products oneDNN with a packed matrix is at least as fast, on some
processors much faster, but its start takes as long as a small product.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.model.transformer import Transformer

ROWS_HINT = 64
"""Number of rows for which oneDNN's layout is chosen; it suits 1 and 256 as well."""
SMALL_PRODUCT = 2**24
"""Number of multiplications below which oneDNN is not faster, because of its start."""


def packed_for_decoding(model: Transformer) -> Transformer:
    """Copy of `model` for inference with packed matrices, on a CPU and in fp32; other models are returned unchanged.

    The copy shares the weights of the model and has two further copies of each matrix, which do not follow changes of
    the model. Results are equal within rounding.
    """
    if not _can_pack(model.output_weight):
        return model
    kept = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, kept)  # tensors in `kept` are shared, not copied
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child is not twin.output:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    object.__setattr__(twin, "logits", PackedLinear(model.output_weight, model.output_bias))
    return twin


class PackedLinear(nn.Module):
    """Computes x W^T + b for inference."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.num_outputs = len(weight)
        self.input_by_input = self.weight.T.contiguous().T
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS_HINT)

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() * self.num_outputs < SMALL_PRODUCT:
            return F.linear(input, self.input_by_input, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(input, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def _can_pack(weight: Tensor) -> bool:
    """True if two operations exist that PyTorch's compiler also uses; builds without oneDNN do not have them."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")  # not public: another release may lack them
    has_operations = has_library and all(hasattr(torch.ops.mkldnn, name) for name in names)
    return has_operations and weight.device.type == "cpu" and weight.dtype == torch.float32
