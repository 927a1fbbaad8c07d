"""Patches for errors of DeepSpeed's optimizers in a step, applied to the objects that it makes (docs/architecture.md lists them).

Others avoid imports of DeepSpeed and torch for features that training never uses: mlflow for the autotuner, torch's
compiler for Muon and for optimizers. The figure beside each is the time to the first step of two ranks without it, relative
to that with it (benchmarks/start.py).
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dist_transformer.distributed.group import Fetched, Ranks

COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier",
    "all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter",
)  # fmt: skip


def delay_scale_growth(optimizer: Any) -> None:
    """Delays growth of the loss scale until after the update, which still unscales by the old one
    (https://github.com/deepspeedai/DeepSpeed/pull/8588)."""
    update_scale, step = optimizer._update_scale, optimizer.step
    waiting: list[bool] = []

    def delayed(has_overflow: bool) -> None:
        if has_overflow:
            update_scale(True)
        else:
            waiting.append(False)

    def step_then_grow(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        while waiting:
            update_scale(waiting.pop())
        return result

    optimizer._update_scale = delayed
    optimizer.step = step_then_grow


def guard_stage_0(engine: Any, clip_norm: float, norm_of: Callable[[list[Tensor]], Tensor], ranks: Ranks) -> None:
    """Adds the gradient norm, as `norm_of` takes it, clipping and the skip of non-finite gradients, which stage 0 lacks."""
    optimizer, step = engine.optimizer, engine.optimizer.step

    def guarded(*args: Any, **kwargs: Any) -> Any:
        norm = norm_of([p.grad for p in engine.module.parameters() if p.grad is not None])
        optimizer._global_grad_norm = norm
        optimizer.overflow = not math.isfinite(Fetched(norm, ranks).value())
        if optimizer.overflow:
            return None
        if clip_norm:
            torch.nn.utils.clip_grads_with_norm_(engine.module.parameters(), clip_norm, norm)
        return step(*args, **kwargs)

    engine.gradient_clipping = lambda: 0.0  # the guard clips
    optimizer.step = guarded


@contextlib.contextmanager
def without_mlflow() -> Iterator[None]:
    """Makes `import mlflow` fail in the block, unless it was imported before; DeepSpeed's autotuner accepts that. 1.48."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # documented: the import raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules["mlflow"]


@contextlib.contextmanager
def not_compiling(deepspeed_compiler: Any) -> Iterator[None]:
    """Disables DeepSpeed's decorators for torch's compiler in the block, as on a torch that cannot compile.

    DeepSpeed compares every optimizer with Muon, whose module compiles; stage 3 excludes its hooks. 1.51 times as fast a start.
    """
    without_compile = patch.object(deepspeed_compiler, "compile", lambda: deepspeed_compiler.dummy_decorator)
    disabled = patch.object(torch.compiler, "disable", lambda fn=None, *_, **__: fn or (lambda function: function))
    with without_compile, disabled:
        yield


def call_as_not_compiled(functions: Iterable[Callable[..., Any]]) -> None:
    """Makes functions decorated by `torch._disable_dynamo` callable without import of the compiler that it disables.

    The attribute is the decorator's own cache of the function to call; without it, or in a version that names it
    otherwise, the decorator works as usual. Start without it and `step_as_not_compiled`: 1.27 times as long.
    """
    for function in functions:
        plain = getattr(function, "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)


def step_as_not_compiled(optimizer: torch.optim.Optimizer) -> None:
    """Removes the compiler's decorators from the optimizer's step: the same arithmetic, without gradients."""
    assert not optimizer.defaults.get("differentiable")
    step = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    optimizer.step = step.__get__(optimizer)  # type: ignore[method-assign]


def share_group(backend: Any) -> None:
    """Gives a backend the group of all ranks, which has our time limit, instead of a second one. Stage 3's barriers are in it:
    torch takes the GPU of a barrier from a broadcast before it in the same group, and else guesses by the rank's number."""
    whole: Any = torch.distributed.group.WORLD
    backend.new_group = lambda _, ranks: whole if len(ranks) == whole.size() else torch.distributed.new_group(ranks)


def name_collectives(backend: Any, note: Callable[[str], None]) -> None:
    """Calls `note` with the name of each collective of a backend before it begins; a later engine replaces `note`."""
    for name in COLLECTIVES:
        method = getattr(backend, name)
        setattr(backend, name, _noted(name, getattr(method, "without_note", method), note))


def _noted(name: str, method: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(method)
    def noted(backend: Any, *args: Any, **kwargs: Any) -> Any:
        over = args[0] if args else next(iter(kwargs.values()), None)
        tensors = [over] if isinstance(over, Tensor) else over if isinstance(over, list) else []
        size = sum(tensor.numel() for tensor in tensors)
        note(f"{name} of {size:,} {str(tensors[0].dtype).removeprefix('torch.')}" if tensors else name)
        return method(backend, *args, **kwargs)

    noted.without_note = method  # type: ignore[attr-defined]
    return noted


def prepare_cpu(deepspeed: Any) -> None:
    """Leaves out what DeepSpeed would compile for a CPU, and allows fp16 there."""
    deepspeed.ops.__compatible_ops__ = {}  # else g++ builds an inference op for 30 to 90 seconds, or fails
    # torch computes in fp16 on every CPU, slowly; DeepSpeed requires AVX512-FP16.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
