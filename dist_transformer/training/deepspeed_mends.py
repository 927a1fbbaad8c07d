"""What DeepSpeed's optimizers get wrong in a step, mended on the objects that it makes (engine.py says what and why)."""

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
