"""Optimizer and state: frozen parameters, Adam's groups, Adam's complete state from the start, the moving average.

Names are those of the model's parameters: `encoder_layers.0.feed_forward.inner.weight`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_transformer.config.parameter_names import all_frozen, is_named, unknown_patterns
from dist_transformer.config.schema import OptimizerConfig
from dist_transformer.errors import UserError
from dist_transformer.training.engine.muon import AdamWithMuon, Rows

PARTS = ("weight", "exp_avg", "exp_avg_sq", "ema")
"""The tensors of a parameter's state: fp32 weight, Adam's two moments, the weight's moving average."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Cut = Callable[[list[nn.Parameter]], list[list[nn.Parameter]]]


def parameter_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns an objective's parameters by their names in the model, tied ones by their first, in a fixed order."""
    return {_model_name(name): parameter for name, parameter in sorted(module.named_parameters())}


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Excludes the parameters that the patterns name from training. Raises UserError: a pattern names no parameter, or
    no parameter is left to train."""
    named = [(_model_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)]
    for problem in unknown_patterns(patterns, [name for name, _ in named]):
        raise UserError(problem).agreed()
    for name, parameter in named:  # a tied one by any of its names
        if is_named(name, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(all_frozen(patterns, list(parameter_names(module)))).agreed()


def build_optimizer(
    settings: OptimizerConfig, parameters: Sequence[nn.Parameter], cut: Cut, fused: bool, matrices: Rows
) -> torch.optim.AdamW:
    """Builds AdamW, with Muon for `matrices`; torch's, since DeepSpeed's own are compiled at start. Vectors do not decay.

    Args:
        parameters: those to train, in order.
        cut: makes groups of those that decay and of those that do not, for each type of weights; groups are ordered by
            their last member.
        fused: in one pass over weights and moments, on CPUs too; on them the last few elements of a tensor are then rounded
            otherwise than those before.
        matrices: those that Muon updates, in groups of their own, with their `rows`.
    """
    rates = {p: 0.0 if p.dim() <= 1 else settings.weight_decay for p in parameters}
    place = {parameter: number for number, parameter in enumerate(parameters)}
    traits = {p: (rates[p], p.dtype, p in matrices) for p in parameters}
    alike = [[p for p in parameters if traits[p] == each] for each in dict.fromkeys(traits.values())]
    groups = sorted((group for some in alike for group in cut(some)), key=lambda group: place[group[-1]])
    groups_of_state: list[dict[str, Any]] = [{"params": group, "weight_decay": rates[group[0]]} for group in groups]
    for group, given in zip(groups, groups_of_state, strict=True):
        if group[0] in matrices:
            given["rows"] = [matrices[p] for p in group]
    optimizer_class, betas = AdamWithMuon if matrices else torch.optim.AdamW, (settings.beta1, settings.beta2)
    return optimizer_class(groups_of_state, lr=0.0, betas=betas, eps=settings.epsilon, fused=fused)


def make_state(optimizer: torch.optim.Optimizer, masters: Iterable[Tensor], with_average: bool) -> None:
    """Makes the state that Adam otherwise makes in its first update, so that memory is allocated before step 1.

    Muon has the first moment only. The moving average is kept beside the moments: it is sharded and offloaded like them,
    and ignored by Adam.
    """
    of_muon = {master for group in optimizer.param_groups if "rows" in group for master in group["params"]}
    for master in masters:
        count, keys = torch.zeros((), device=master.device), MOMENTS[:1] if master in of_muon else MOMENTS
        optimizer.state[master] = {"step": count, **{key: torch.zeros_like(master.detach()) for key in keys}}
        if with_average:
            optimizer.state[master]["ema"] = master.detach().clone()


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, masters: Iterable[Tensor], decay: float, updates: int) -> None:
    """Moves the average towards the weights after update number `updates`.

    The first averages decay fast, so that the initial weights do not persist in them: the decay of update n is
    min(decay, (1 + n) / (10 + n)), as with `num_updates` of TensorFlow's `tf.train.ExponentialMovingAverage`.
    """
    weight, held = 1.0 - min(decay, (1 + updates) / (10 + updates)), list(masters)
    torch._foreach_lerp_([optimizer.state[master]["ema"] for master in held], [m.detach() for m in held], weight)


def deal_out(sizes: dict[str, int], num_ranks: int) -> dict[str, int]:
    """Assigns each tensor that every rank holds to the rank that saves it, balanced by size; the same on every rank."""
    loads, owners = [0] * num_ranks, {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += size
    return owners


def _model_name(name: str) -> str:
    return name.removeprefix("model.")  # the objective wraps the model under this name
