"""Operations that a micro-batch and a step start on a device, casts among them, and waits of the host for it.

    .venv/bin/python benchmarks/launches.py

Counted by a dispatch mode on a CPU, with the kernels that are for CPUs only (model/cpu_kernels.py) replaced by the ones
that a GPU gets; views start nothing and are left out. On a GPU each operation is at least one kernel launch, of some
five microseconds of the host's time. Sizes do not change the counts, but for the chunks of the loss.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from common import arguments_of, begin, finish, markdown_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model import attention, layers, loss
from dist_transformer.model.cpu_kernels import Linear
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.objective import Objective

VOCABULARY, PAD_ID = 1000, 3
ROWS, LENGTH = 8, 32
PRECISIONS = ("fp32", "bf16", "fp16")
CASTS = ("aten._to_copy",)
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.equal", "aten.is_nonzero", "aten._unique2")
"""Operations whose result the host needs: it waits for all that was started before."""
FREE = ("aten.detach", "aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.lift_fresh")
"""Operations that allocate or rename, and start nothing."""


@dataclass
class Counts(TorchDispatchMode):
    """Counts operations by name; two operations that differ in their overload are one."""

    by_name: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = ".".join(str(func).split(".")[:2])
        if not func.is_view and name not in FREE:
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    def of(self, names: tuple[str, ...]) -> int:
        return sum(self.by_name[name] for name in names)

    @property
    def total(self) -> int:
        return self.by_name.total()


@contextmanager
def gpu_paths() -> Iterator[None]:
    """Replaces the kernels that are for CPUs only."""

    def attend(query: Tensor, past: Any, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(
            query, past.key_BHSK, past.value_BHSV, attn_mask=mask, is_causal=is_causal
        )

    def dropout(module: layers.Dropout, input: Tensor) -> Tensor:
        return F.dropout(input, module.probability, module.training)

    with ExitStack() as stack:
        for owner, name, value in (
            (attention, "attend", attend),
            (layers.Dropout, "forward", dropout),
            (Linear, "forward", nn.Linear.forward),
            (loss, "CPU_CHUNK_TOKENS", loss.CHUNK_TOKENS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def micro_batch_counts(preset: str, precision: str) -> Counts:
    """Counts one forward and backward pass."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig(preset=preset), VOCABULARY, VOCABULARY, PAD_ID)
    objective = Objective(model.half() if precision == "fp16" else model, 0.1, precision)
    objective.train()
    source, target = torch.randint(4, VOCABULARY, (2, ROWS, LENGTH))
    source[-1, -4:] = target[-1, -4:] = PAD_ID
    num_targets = int((target != PAD_ID).sum())
    counts = Counts()
    with gpu_paths():
        objective(source, target, target, num_targets)[0].backward()  # gradients exist from here on
        with counts:
            objective(source, target, target, num_targets)[0].backward()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["base", "big"])
    parser.add_argument("--largest", type=int, default=12, help="names printed of the most frequent operations")
    arguments = arguments_of(parser, rounds=1)
    found = begin(threads=2)
    figures: dict[str, dict[str, int]] = {}
    rows = []
    for preset in arguments.presets:
        for precision in PRECISIONS:
            counts = micro_batch_counts(preset, precision)
            figures[f"{preset} {precision}"] = dict(counts.by_name)
            rows.append([f"{preset}, {precision}", *map(str, (counts.total, counts.of(CASTS), counts.of(WAITS)))])
            most = ", ".join(f"{name} {n}" for name, n in counts.by_name.most_common(arguments.largest))
            print(f"{preset}, {precision}: {most}", flush=True)
    print("\n" + markdown_table(["one micro-batch", "operations", "casts", "waits"], rows))
    finish(arguments, found, figures)


if __name__ == "__main__":
    main()
