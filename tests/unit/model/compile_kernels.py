"""Compiles the kernels without a GPU, and prints the shared memory of each as JSON.

Each argument is a compute capability and the largest number of tokens of a row, as 90:128. Types are those of a launch in bf16.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dist_transformer.model import triton_kernels

ATTENTION = dict.fromkeys(("q_stride", "kv_stride", "out_stride"), "i32")
ATTENTION |= {"q_starts": "*i64", "k_starts": "*i64", "scale": "fp32"}
NORM = {"means": "*fp32", "scales": "*fp32", "of_weights": "*fp32", "of_biases": "*fp32", "epsilon": "fp32"}
NORM |= {"num_tokens": "i32", "size": "i32"}
LOGITS = dict.fromkeys(("logits", "mean_logits", "losses", "nlls"), "*fp32")
LOGITS |= {"targets": "*i64", "num_pieces": "i32", "smoothing": "fp32", "scale": "fp32"}


def shared_bytes(capability: int, name: str, types: dict[str, str], constants: dict[str, int], **options: int) -> int:
    kernel = getattr(triton_kernels, name)
    signature = {each: "constexpr" if each in constants else types.get(each, "*bf16") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, signature, places), target=target, options=options).metadata.shared


def compile_for(capability: int, longest: int) -> dict[str, int]:
    row = {"Q": longest, "K": longest, "SIZE": 128, "CAUSAL": True}
    kernels = {name: (ATTENTION, row, {"num_warps": 4, "num_stages": 1}) for name in ("attend", "attend_backward")}
    kernels["add_norm"] = NORM, {"BLOCK": 1024}, {"num_warps": 4}
    kernels["add_norm_backward"] = NORM, {"BLOCK": 1024}, {"num_warps": 1}
    kernels["gradient_of_logits"] = LOGITS, {"BLOCK": 4096}, {"num_warps": 8}
    return {name: shared_bytes(capability, name, *given, **options) for name, (*given, options) in kernels.items()}


print(
    json.dumps(
        {each: compile_for(*map(int, (each, longest))) for each, longest in (a.split(":") for a in sys.argv[1:])}
    )
)
