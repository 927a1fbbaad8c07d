"""A model whose matrices are laid out for the CPU once, instead of in every product: the same numbers, faster.

Decoding consists of small products, dominated by reading the matrix. oneDNN with a packed matrix is the fastest for all
but the smallest on AMD's processors, by a factor of three for the rows of a beam, and for larger ones on others; its start
takes as long as a small product. The rest is done by PyTorch's usual library, up to twice as fast with the matrix stored
input by input.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.model.cpu_kernels import has_faster_products
from dist_transformer.model.layers import AddAndNorm, Dropout, FeedForward
from dist_transformer.model.transformer import Transformer

ROWS_HINT = 64
"""Number of rows for which oneDNN's layout is chosen; it suits 1 and 256 as well."""
ROWS_TOGETHER = 16
"""More rows are filled up to a multiple of this: oneDNN compiles a kernel for each number of rows, in the time of several
products, and a batch has fewer rows whenever a sentence ends."""
SMALL_PRODUCT = {True: 2**18, False: 2**24}
"""Number of multiplications below which oneDNN is not faster, because of its start: on processors for which it has the
faster products in general, as `cpu_kernels` found, and on others."""


def packed_for_decoding(model: Transformer) -> Transformer:
    """Copy of `model` for inference with packed matrices, on a CPU and in fp32; other models are returned unchanged.

    The copy shares the weights of the model and has one or two further copies of each matrix, which do not follow changes of
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
    _call_directly(twin)
    return twin


class PackedLinear(nn.Module):
    """Computes x W^T + b for inference."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.num_outputs = len(weight)
        self.small_product = SMALL_PRODUCT[has_faster_products(self.weight)]
        has_small_products = self.weight.numel() < self.small_product
        self.input_by_input = self.weight.T.contiguous().T if has_small_products else None
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS_HINT)

    def forward(self, input: Tensor) -> Tensor:
        if self.input_by_input is not None and input.numel() * self.num_outputs < self.small_product:
            return F.linear(input, self.input_by_input, self.bias)
        rows_BI = input.flatten(0, -2)
        num_rows = len(rows_BI)
        if num_more := -num_rows % ROWS_TOGETHER if num_rows > ROWS_TOGETHER else 0:
            rows_BI = F.pad(rows_BI, (0, 0, 0, num_more))
        output_BO = torch.ops.mkldnn._linear_pointwise.default(rows_BI, self.packed, self.bias, "none", [], "")
        return output_BO[:num_rows].view(*input.shape[:-1], self.num_outputs)  # type: ignore[no-any-return]


def _call_directly(model: Transformer) -> None:
    """Lets the modules of a model without hooks find and call one another without PyTorch's `__getattr__` and
    `__call__`, which take as long as the smallest products."""
    only_called = (AddAndNorm, FeedForward, Dropout, nn.LayerNorm, nn.RMSNorm, PackedLinear)
    for parent in model.modules():
        for name, child in parent.named_children():
            parent.__dict__[name] = child.forward if isinstance(child, only_called) else child


def _can_pack(weight: Tensor) -> bool:
    """True if two operations exist that PyTorch's compiler also uses; builds without oneDNN do not have them."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")  # not public: another release may lack them
    has_operations = has_library and all(hasattr(torch.ops.mkldnn, name) for name in names)
    return has_operations and weight.device.type == "cpu" and weight.dtype == torch.float32
