"""The only door to DeepSpeed: wraps the model in ZeRO, makes a step of it, and reads and writes its whole state.

What DeepSpeed 0.19.8 gets wrong is mended here, each mend with a test:
- stages 1 to 3 with fp16 halve the gradient on each step at which the loss scale grows (`_delay_scale_growth`;
  https://github.com/deepspeedai/DeepSpeed/pull/8588);
- stage 0 reports no gradient norm and applies non-finite gradients (`_guard_stage_0`);
- stages 1 and 2 with several parameter groups lose sight of the moments of all but the first (`_link_moments`);
- timeouts do not reach its data-parallel group (`_pass_timeout`);
- on CPUs it compiles a shared-memory op that training never uses, and refuses fp16 (`_prepare_cpu`).

State is read and written by parameter name, in fp32, through DeepSpeed's tensor-fragment functions: the same names and
values for every ZeRO stage, precision and number of ranks.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dist_transformer.config.models import OptimizerConfig, TrainingConfig
from dist_transformer.distributed import Ranks
from dist_transformer.errors import UserError
from dist_transformer.training.objective import Objective

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*", category=FutureWarning)

import deepspeed  # noqa: E402
from deepspeed.comm.torch import TorchBackend  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, by the names torch and DeepSpeed give them."""


@dataclass(frozen=True)
class ParameterState:
    """One parameter whole, in fp32 on the CPU: its weight and Adam's moments, all of the parameter's shape."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Engine:
    """An `Objective` under DeepSpeed.

    Every method is collective: call it on all ranks, in the same order.
    """

    def __init__(self, module: Objective, training: TrainingConfig, optimizer: OptimizerConfig, ranks: Ranks) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if ranks.device.type == "cpu":
            _prepare_cpu()
        _pass_timeout(ranks)
        deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)
        self._ranks = ranks
        self._stage = training.zero_stage
        self._moments_linked = self._stage not in (1, 2)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=_adam(module, optimizer, ranks.device),
            config=_deepspeed_config(training),
            dist_init_required=False,
        )
        if self._stage == 0:
            _guard_stage_0(self._engine, training.gradient_clip_norm)
        elif training.precision == "fp16":
            _delay_scale_growth(self._engine.optimizer)

    def __call__(self, *inputs: Tensor) -> Any:
        """The objective's forward pass."""
        return self._engine(*inputs)

    def train(self, mode: bool = True) -> None:
        """Dropout on (True) or off."""
        self._engine.train(mode)

    def backward(self, loss_sum: Tensor, global_tokens: int) -> None:
        """Adds the gradient of loss_sum / global_tokens (promise P4).

        DeepSpeed averages over ranks, so the sum is multiplied by their number. Every rank calls it equally often.
        """
        self._engine.backward(loss_sum * (self._ranks.num_ranks / global_tokens), scale_wrt_gas=False)

    def step(self, learning_rate: float) -> bool:
        """One optimizer update. False: the gradient was not finite and nothing moved (but fp16's loss scale).

        Raises:
            UserError: fp16's loss scale is at its floor and the gradient is still not finite.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        skipped = self._engine.skipped_steps
        try:
            self._engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise UserError(
                "the fp16 loss scale is at its minimum and gradients still overflow: training diverged. Resume from the "
                "last checkpoint with a lower optimizer.learning_rate, a longer schedule.warmup_steps, or "
                "training.precision=bf16"
            ) from error
        applied = bool(self._engine.skipped_steps == skipped)
        if applied and not self._moments_linked:
            self._link_moments()
        return applied

    def gradient_norm(self) -> float:
        """The 2-norm of the last step's whole gradient, unscaled and before clipping."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def loss_scale(self) -> float:
        """fp16's loss scale; 1 in other precisions."""
        return float(self.scaler_state().get("cur_scale", 1.0))

    def scaler_state(self) -> dict[str, Any]:
        """The loss scaler's numbers, for a checkpoint; empty when it is not fp16's dynamic one."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if not hasattr(scaler, "cur_iter"):
            return {}
        return {k: v for k, v in vars(scaler).items() if isinstance(v, int | float | bool)}

    def set_scaler_state(self, state: dict[str, Any]) -> None:
        """Puts back `scaler_state`; a state of another precision is left aside."""
        if self.scaler_state():
            for name, value in state.items():
                setattr(self._engine.optimizer.loss_scaler, name, value)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's names and (perhaps partitioned) parameters, tied ones once, in a fixed order."""
        for name, parameter in sorted(self._engine.module.named_parameters()):
            yield name.removeprefix("model."), parameter  # the objective wraps the model under this name

    def read(self, parameter: nn.Parameter) -> ParameterState:
        """The whole state of one parameter (collective). Moments are zero before the first update."""
        if self._stage == 0:
            state = self._engine.optimizer.state.get(parameter, {})
            moments = [state.get(key) for key in MOMENTS]
            weight = parameter.detach()
        else:
            weight = safe_get_full_fp32_param(parameter)
            ready = bool(_inner_optimizer(self._engine).state)
            moments = [safe_get_full_optimizer_state(parameter, key) if ready else None for key in MOMENTS]
        zero = torch.zeros_like(weight)
        tensors = [weight, *(zero if m is None else m for m in moments)]
        return ParameterState(*(t.detach().to("cpu", torch.float32, copy=True) for t in tensors))

    def prepare_write(self, step: int) -> None:
        """Makes Adam's state, which it otherwise makes in its first update, with `step` updates done."""
        optimizer = self._engine.optimizer
        if self._stage == 0:
            flats = [p for group in optimizer.param_groups for p in group["params"]]
        elif self._stage == 3:
            flats = list(optimizer.fp32_partitioned_groups_flat)
        else:
            flats = list(optimizer.single_partition_of_fp32_groups)
        inner = _inner_optimizer(self._engine)
        for flat in flats:
            device = flat.device if inner.defaults.get("fused") else "cpu"
            count = torch.tensor(float(step), device=device)
            inner.state[flat] = {"step": count, **{key: torch.zeros_like(flat.data) for key in MOMENTS}}
        if self._stage in (1, 2):
            self._link_moments()

    def write(self, parameter: nn.Parameter, state: ParameterState) -> None:
        """Sets the whole state of one parameter (collective); after `prepare_write`."""
        if self._stage == 0:
            parameter.data.copy_(state.weight)
            for key in MOMENTS:
                self._engine.optimizer.state[parameter][key].copy_(getattr(state, key))
            return
        safe_set_full_fp32_param(parameter, state.weight.to(self._ranks.device))
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, getattr(state, key).to(self._ranks.device), key)
        # The line above sets the fp32 master; the forward pass uses a copy of its own.
        if self._stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(state.weight)
        else:
            parameter.data.copy_(state.weight)

    def _link_moments(self) -> None:
        """Shows DeepSpeed's fragment functions where Adam's moments are: it looks before the later groups have any."""
        self._engine.optimizer._hp_optimizer_states_linked = False
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        self._moments_linked = True


def _adam(module: nn.Module, settings: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Adam as torch has it: DeepSpeed's own are compiled at start. Vectors (norms, biases) do not decay."""
    parameters = list(module.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if settings.weight_decay:
        groups = [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups,
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=device.type == "cuda",
    )


def _deepspeed_config(training: TrainingConfig) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only counts with it; our micro-batches are of tokens
        "gradient_clipping": training.gradient_clip_norm,
        "zero_optimization": {"stage": training.zero_stage, "overlap_comm": False},
        "managed_gradient_accumulation": False,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**12,
    }
    if training.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": training.initial_loss_scale.bit_length() - 1,
            "loss_scale_window": training.loss_scale_window,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    return config


def _inner_optimizer(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _prepare_cpu() -> None:
    deepspeed.ops.__compatible_ops__ = {}  # else g++ builds an op of inference for 30 to 90 seconds, or fails
    # torch computes in fp16 on every CPU, slowly; DeepSpeed asks for AVX512-FP16.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def _pass_timeout(ranks: Ranks) -> None:
    def new_group(backend: Any, members: list[int]) -> Any:
        return torch.distributed.new_group(members, timeout=ranks.timeout)

    TorchBackend.new_group = new_group


def _delay_scale_growth(optimizer: Any) -> None:
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


def _guard_stage_0(engine: Any, clip_norm: float) -> None:
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
