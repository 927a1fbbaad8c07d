"""FLOPs of a training step and the published FLOP/s of devices, whose quotient is the MFU.

    a token times a matrix of n elements: 2 n in the forward pass, 4 n in the backward pass
    a query and k keys, in one layer: 2 k (K + V) H forward, twice that backward; causal layers are counted in full

Only real tokens and matrix products count: no padding, norms, dropout or recomputation in the backward pass. These are
the model FLOPs of MFU in Chowdhery et al. (2022), "PaLM", appendix B, with encoder and decoder counted separately.
"""

import re
from dataclasses import dataclass

from dist_transformer.config.model_size import feed_forward_matrices
from dist_transformer.config.schema import ModelConfig
from dist_transformer.planning.activations import projected_width
from dist_transformer.planning.hardware import HARDWARE

PASSES = 6
"""FLOPs per element of a matrix and token: a multiplication and an addition forward, and twice as much backward."""

_KINDS = {
    r"\bH200\b(?! NVL)": "h200-141g",
    r"\bH100 80GB HBM3": "h100-80g",
    r"\bA100.*80GB": "a100-80g",
    r"\bA100.*40GB": "a100-40g",
    r"\bL40S\b": "l40s-48g",
    r"\bRTX 4090$": "rtx4090-24g",
    r"\bV100-SXM": "v100-32g",
}
"""GPUs by CUDA's device names. Variants with other clocks are missing: H100 PCIe, H200 NVL, V100 PCIe."""


def gpu_kind(device_name: str) -> str | None:
    """Returns the name that `plan --gpu` has for a device with CUDA's name; None: unknown, or a part of one (MIG)."""
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, device_name)), None)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward pass.

    Attributes:
        projections: projections of queries, keys, values and attention results.
        scores: queries times keys, and weights times values.
        output: hidden states times the vocabulary, in the loss.
    """

    projections: float
    scores: float
    feed_forward: float
    output: float

    @property
    def total(self) -> float:
        return self.projections + self.scores + self.feed_forward + self.output


def model_flops(
    model: ModelConfig, target_vocabulary: int, pairs: float, source_tokens: float, target_tokens: float
) -> ModelFlops:
    """FLOPs of `pairs` with so many tokens in all. The scores assume pairs of equal length, which is a lower bound."""
    width, encoder, decoder = projected_width(model), model.num_encoder_layers, model.num_decoder_layers
    square, network = model.d_model * width, feed_forward_matrices(model) * model.d_model * model.d_ff
    # Queries, keys, values and output are 2 squares; half of the cross-attention is the source's.
    projected = encoder * 2 * square * source_tokens + decoder * square * (3 * target_tokens + source_tokens)
    of_lengths = encoder * source_tokens**2 + decoder * target_tokens * (target_tokens + source_tokens)
    return ModelFlops(
        projections=PASSES * projected,
        scores=PASSES * width * of_lengths / pairs,
        feed_forward=PASSES * network * (encoder * source_tokens + decoder * target_tokens),
        output=PASSES * target_vocabulary * model.d_model * target_tokens,
    )


def published_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of the data sheet; None for a device or precision missing in the table of GPUs, and for a slice of a
    GPU (MIG).

    The rate of fp32 is that of fp32 arithmetic: training does not round to TF32.
    """
    kind = gpu_kind(device_name)
    if kind is None or (precision == "bf16" and kind.startswith("v100")):  # a V100 has no bf16 units
        return None
    gpu = HARDWARE[kind]
    return (gpu.single_tflops if precision == "fp32" else gpu.half_tflops).value * 1e12
