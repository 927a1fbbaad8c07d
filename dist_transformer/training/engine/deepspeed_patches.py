"""What DeepSpeed's optimizers get wrong in a step, mended on the objects that it makes (engine.py says what and why).

And what DeepSpeed and torch import at the start of every rank for features that training here never uses: mlflow for
the autotuner, torch's compiler for Muon and for optimizers. Each import left out is about a CPU second of each rank.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def delay_scale_growth(optimizer: Any) -> None:
    """Lets the loss scale grow only after the update that still unscales by the old one."""
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


def guard_stage_0(engine: Any, clip_norm: float) -> None:
    """Gradient norm, clipping and the skip of non-finite gradients, which stage 0 lacks."""
    optimizer, step = engine.optimizer, engine.optimizer.step

    def guarded(*args: Any, **kwargs: Any) -> Any:
        norm = torch.nn.utils.get_total_norm(p.grad for p in engine.module.parameters() if p.grad is not None)
        optimizer._global_grad_norm = norm
        optimizer.overflow = not bool(torch.isfinite(norm))
        if optimizer.overflow:
            return None
        if clip_norm:
            torch.nn.utils.clip_grads_with_norm_(engine.module.parameters(), clip_norm, norm)
        return step(*args, **kwargs)

    engine.gradient_clipping = lambda: 0.0  # the guard clips
    optimizer.step = guarded


@contextlib.contextmanager
def without_mlflow() -> Iterator[None]:
    """Within it `import mlflow` fails, where it was not imported before: DeepSpeed's autotuner takes that for an answer."""
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
    """Within it what DeepSpeed decorates for torch's compiler stays as it is, as on a torch that cannot compile.

    Every optimizer is compared with Muon, whose module compiles its kernels at import; stage 3 hides its hooks.
    """
    compile_decorator, disable = deepspeed_compiler.compile, torch.compiler.disable
    deepspeed_compiler.compile = lambda: deepspeed_compiler.dummy_decorator
    torch.compiler.disable = lambda fn=None, *_, **__: fn or (lambda function: function)
    try:
        yield
    finally:
        deepspeed_compiler.compile, torch.compiler.disable = compile_decorator, disable


def call_as_not_compiled(functions: Iterable[Callable[..., Any]]) -> None:
    """Calls what `torch._disable_dynamo` decorates without importing the compiler from which it hides them.

    The attribute is the decorator's own cache of what to call; without it, or where it has another name, it works as
    before.
    """
    for function in functions:
        plain = getattr(function, "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)


def step_as_not_compiled(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step without the marks for the compiler around it: the same arithmetic, without gradients."""
    assert not optimizer.defaults.get("differentiable")
    step = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    optimizer.step = step.__get__(optimizer)  # type: ignore[method-assign]
