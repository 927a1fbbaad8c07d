"""Operations that a step starts on a device, casts among them, and waits of the host for it.

    .venv/bin/python benchmarks/launches.py

Counted by a dispatch mode on a CPU, on one rank of ZeRO 1, with the kernels that are for CPUs only (model/cpu_kernels.py)
replaced by the ones that a GPU gets; views start nothing and are left out. On a GPU each operation is at least one kernel
launch, of some five microseconds of the host's time. Sizes do not change the counts, but for the chunks of the loss and for
Muon, which updates matrices of one size together. Not counted: the copy of a micro-batch to the device, and of several ranks
two collectives for each bucket of gradients.

A step is a micro-batch, one more, which adds to its gradients, a last one, which sends them too, and the update.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from common import arguments_of, begin, finish, markdown_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dist_transformer.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.model import attention, layers, loss
from dist_transformer.model.cpu_kernels import Linear
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.precision import FP16_ON_CPU

VOCABULARY, PAD_ID = 1000, 3
ROWS, LENGTH = 2, 8  # small: CPUs without instructions for 16 bits multiply slowly in them
PRECISIONS = ("fp32", "bf16", "fp16")
MICRO_BATCH = "micro-batch"
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
        return torch.native_dropout(input, module.probability, module.training)[0]  # one kernel, as F.dropout on CUDA

    with ExitStack() as stack:
        for owner, name, value in (
            (attention, "attend", attend),
            (layers.Dropout, "forward", dropout),
            (Linear, "forward", nn.Linear.forward),
            (loss, "CPU_CHUNK_TOKENS", loss.CHUNK_TOKENS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def step_counts(
    preset: str, precision: str, ranks: Ranks, width: int | None, matrices: Literal["adam", "muon"]
) -> dict[str, Counts]:
    """Counts the parts of a step of three micro-batches. `width`: of the layers, in place of the preset's."""
    torch.manual_seed(1)
    training = TrainingConfig(precision=precision, zero_stage=1, gradient_clip_norm=1.0)
    sizes = {} if width is None else {"d_model": width, "d_ff": width}
    model = Transformer(ModelConfig(preset=preset, **sizes), VOCABULARY, VOCABULARY, PAD_ID)
    engine = Engine(Objective(model, 0.1, precision), training, OptimizerConfig(matrices=matrices), ranks)
    source, target = torch.randint(4, VOCABULARY, (2, ROWS, LENGTH))
    source[-1, -4:] = target[-1, -4:] = PAD_ID
    num_targets = int((target != PAD_ID).sum())

    def micro_batch(is_last: bool) -> None:
        loss, _ = engine(source, target, target, num_targets)
        engine.backward(loss, 3 * num_targets, is_last)

    parts = {
        MICRO_BATCH: lambda: micro_batch(is_last=False),
        "one more": lambda: micro_batch(is_last=False),
        "last micro-batch": lambda: micro_batch(is_last=True),
        "update": lambda: engine.step(1e-4),
    }
    found = {name: Counts() for name in parts}
    with gpu_paths():
        for name, part in [*parts.items(), *parts.items()]:  # the second time counts: buffers and tables exist
            found[name].by_name.clear()
            with found[name]:
                part()
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["base", "big"])
    parser.add_argument("--width", type=int, help="of layers: only Muon's counts depend on it; default: the preset's")
    parser.add_argument("--matrices", choices=["adam", "muon"], default="adam", help="optimizer.matrices")
    parser.add_argument("--largest", type=int, default=12, help="names printed of the most frequent operations")
    arguments = arguments_of(parser, rounds=1)
    found = begin(threads=1)
    os.environ[FP16_ON_CPU] = "1"
    ranks = group.join(600)
    figures: dict[str, dict[str, dict[str, int]]] = {}
    rows = []
    for preset in arguments.presets:
        for precision in PRECISIONS:
            counts = step_counts(preset, precision, ranks, arguments.width, arguments.matrices)
            figures[f"{preset} {precision}"] = {
                part: {"operations": c.total, "casts": c.of(CASTS), "waits": c.of(WAITS)} for part, c in counts.items()
            }
            cells = [f"{c.total} / {c.of(CASTS)} / {c.of(WAITS)}" for c in counts.values()]
            rows.append([f"{preset}, {precision}", *cells])
            for part in (MICRO_BATCH, "update"):
                most = ", ".join(f"{name} {n}" for name, n in counts[part].by_name.most_common(arguments.largest))
                print(f"{preset}, {precision}, {part}: {most}", flush=True)
    print("\n" + markdown_table(["operations / casts / waits", *counts], rows))
    finish(arguments, found, figures)
    group.leave()


if __name__ == "__main__":
    main()
