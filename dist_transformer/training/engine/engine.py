"""The only adapter of DeepSpeed: wraps the model in ZeRO, computes its steps, reads and sets its complete state.

Errors of DeepSpeed 0.19.8 are fixed here and in deepspeed_patches.py; docs/architecture.md lists them, with their tests.

State is read and set by parameter name, in fp32, by each rank for its own part (sharded_state.py): the same names and
values for every ZeRO stage, precision and number of ranks.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_transformer.config.model_size import has_bf16_layers, num_buckets, sends_during_backward
from dist_transformer.config.schema import OptimizerConfig, TrainingConfig
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import JoinedShape
from dist_transformer.training.divergence import Diverged
from dist_transformer.training.engine import deepspeed_patches, gradient_exchange, sharded_state
from dist_transformer.training.engine import optimizer as optimizers
from dist_transformer.training.engine.bit_sums import GradientSums, RestingSums, sums_by_part
from dist_transformer.training.engine.deepspeed_config import deepspeed_config
from dist_transformer.training.engine.fixed_point import norm_of
from dist_transformer.training.engine.gradient_exchange import Bucket, GradientExchange, WeightGather
from dist_transformer.training.engine.muon import Rows, matrices_of
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.engine.optimizer import PARTS, freeze, parameter_names
from dist_transformer.training.engine.sharded_state import Fragment, Shard

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*", category=FutureWarning)

with deepspeed_patches.without_mlflow():
    import deepspeed
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime import compiler
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

INITIAL_LOSS_SCALE = 65_536
"""The first loss scale of fp16, a power of 2: it halves within some ten steps where that is too much."""
LOSS_SCALE_WINDOW = 1000
"""Steps without overflow after which the loss scale of fp16 doubles."""
SCALER_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Variables of DeepSpeed's dynamic loss scaler; its other attributes are configuration."""


class Engine:
    """An `Objective` under DeepSpeed.

    Every method is collective unless it says otherwise: call it on all ranks, in the same order.
    """

    def __init__(self, module: Objective, training: TrainingConfig, optimizer: OptimizerConfig, ranks: Ranks) -> None:
        """Raises `UserError` if a pattern of `freeze` names no parameter."""
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if ranks.device.type == "cpu":
            deepspeed_patches.prepare_cpu(deepspeed)
        deepspeed_patches.share_group(TorchBackend)
        deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)
        deepspeed_patches.name_collectives(TorchBackend, ranks.note_collective)
        self._ranks, self._stage, self._ema_decay = ranks, training.zero_stage, training.ema_decay
        self._updates, self._resting = 0, RestingSums() if training.audit_share else None
        freeze(module, training.freeze)
        self._parameters = parameter_names(module)
        is_rounded = training.precision == "fp16" or has_bf16_layers(training)
        exact = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()} if is_rounded else {}
        if has_bf16_layers(training):
            module.round_layers()
        deepspeed_patches.call_as_not_compiled(
            [*vars(torch.optim.Optimizer).values(), *vars(PartitionedParameterCoordinator).values()]
        )
        self._same_bits = training.same_bits
        is_exchanged = training.same_bits or training.zero_stage > 0 or ranks.num_ranks > 1
        is_ours = is_exchanged and sends_during_backward(training)
        cut = partial(gradient_exchange.in_buckets, num_buckets(ranks.num_ranks)) if is_ours else lambda alike: [alike]
        matrices: Rows = matrices_of(module.model) if {"adam": False, "muon": True}[optimizer.matrices] else {}
        parameters = gradient_exchange.in_order_of_backward(module.model)
        updates = optimizers.build_optimizer(optimizer, parameters, cut, not training.same_bits, matrices)
        deepspeed_patches.step_as_not_compiled(updates)
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # of the shell, if mpirun started it; DeepSpeed compares it
        with deepspeed_patches.not_compiling(compiler):
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=updates,
                config=deepspeed_config(training, ranks, module, INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW),
                dist_init_required=False,
            )
        for piece in self._pieces() if exact else []:
            piece.weight.copy_(exact[piece.name].view(-1)[piece.start : piece.start + piece.length])
        optimizers.make_state(self._optimizer(), self._masters(), self._ema_decay is not None)
        self._exchange: GradientExchange | None = None
        self._gather: WeightGather | None = None
        self._engine.enable_backward_allreduce = training.offload != "none" or self._stage == 3
        if self._stage == 0:
            norm = norm_of if training.same_bits else torch.nn.utils.get_total_norm
            deepspeed_patches.guard_stage_0(self._engine, training.gradient_clip_norm, norm, ranks)
        if is_ours:
            self._exchange_gradients(training, ranks)
        elif training.precision == "fp16":
            deepspeed_patches.delay_scale_growth(self._engine.optimizer)
        if training.precision == "fp16":
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        trained = [p for p in self._parameters.values() if p.requires_grad]
        self.gradient_sums = GradientSums(trained if training.audit_share else [])

    def _exchange_gradients(self, training: TrainingConfig, ranks: Ranks) -> None:
        optimizer = self._engine.optimizer
        if self._stage == 0:
            groups = [group["params"] for group in optimizer.param_groups]
            sizes = [sum(p.numel() for p in group) for group in groups]
        else:
            groups, sizes = optimizer.bit16_groups, [flat.numel() for flat in optimizer.bit16_groups_flat]
        buckets = [Bucket(group, size, training.same_bits) for group, size in zip(groups, sizes, strict=True)]
        by_precision = torch.float16 if training.precision == "fp16" else torch.float32
        dtype = {"auto": by_precision, "fp32": torch.float32, "bf16": torch.bfloat16}[training.communication_dtype]
        self._exchange = GradientExchange(buckets, ranks, self._stage, dtype)
        if self._stage == 0:
            gradient_exchange.exchange_in_stage_0(self._engine, self._exchange)
        else:
            self._gather = WeightGather(self._engine.module, self._engine.module.model, buckets, ranks)
            if self._resting is not None:
                self._gather.arrived = self._weights_arrived
            gradient_exchange.exchange_in_shards(
                self._engine, self._exchange, self._gather, ranks, training.gradient_clip_norm
            )

    def __call__(self, *inputs: Tensor | Sequence[JoinedShape] | int | None) -> Any:
        """Computes the objective's forward pass."""
        return self._engine(*inputs)

    def train(self, mode: bool = True) -> None:
        """Switches dropout on (True) or off (not collective)."""
        self._engine.train(mode)

    def _share_of_loss(self, loss_sum: Tensor, global_tokens: int) -> Tensor:
        # Gradients are averaged over ranks, so the sum is multiplied by their number, unless they are summed in fixed point.
        return loss_sum * ((1 if self._same_bits else self._ranks.num_ranks) / global_tokens)

    def backward(self, loss_sum: Tensor, global_tokens: int, is_last: bool = True) -> None:
        """Adds the gradient of loss_sum / global_tokens. Every rank calls it equally often.

        `is_last`: of the step. Always true is right too, and sends gradients more often.
        """
        if self._resting is not None:
            self._resting.check("gradients", self._gradients())
        if self._exchange is not None:
            self._exchange.begin_backward(is_last)
        self._engine.backward(self._share_of_loss(loss_sum, global_tokens), scale_wrt_gas=False)
        if self._exchange is not None:
            self._exchange.end_backward()
        if self._resting is not None:
            self._resting.note("gradients", self._gradients())

    def sums_of_backward(self, loss_sum: Tensor, global_tokens: int) -> Tensor:
        """Returns the `gradient_sums` that `backward` would give, and changes no gradient (not collective; stages 0 to 2)."""
        scale = getattr(self._engine.optimizer, "scale_if_loss", lambda loss: loss)
        return self.gradient_sums.of(scale(self._share_of_loss(loss_sum, global_tokens)))

    def drop_gradients(self) -> None:
        """Forgets the gradients of this step, so that it can be computed again."""
        if self._exchange is not None:
            self._exchange.means()
            self._exchange.release()
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._resting is not None:
            self._resting.forget("gradients")

    def step(self, learning_rate: float) -> bool:
        """Applies one optimizer update. False: the gradient was not finite, and only fp16's loss scale has changed.
        Raises Diverged: fp16's loss scale is at its floor and the gradient is still not finite. Nothing has changed."""
        if self._resting is None:
            return self._step(learning_rate)
        self._resting.check("gradients", self._gradients())
        self._resting.check("state", self._state())
        for number, flat in enumerate(self._flat_weights()):
            self._resting.check(f"weights {number}", [flat])
        is_applied = self._step(learning_rate)
        self._resting.note("state", self._state())
        return is_applied

    def _step(self, learning_rate: float) -> bool:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        skipped, scale = self._engine.skipped_steps, self.loss_scale()
        self._engine.step()
        if self._engine.skipped_steps != skipped:
            if self.scaler_state() and scale == self._engine.optimizer.loss_scaler.min_scale:
                raise Diverged(
                    f"the fp16 loss scale is at its minimum, {scale:g}, and gradients still overflow", self._updates + 1
                )
            return False
        self._updates += 1
        if self._ema_decay is not None:
            optimizers.update_average(self._optimizer(), self._masters(), self._ema_decay, self._updates)
        return True

    def _weights_arrived(self, number: int) -> None:
        assert self._resting is not None
        self._resting.note(f"weights {number}", [self._flat_weights()[number]])

    def changed_at_rest(self) -> list[str]:
        """Returns the kinds of this rank's memory that changed while nothing wrote it (not collective; with an audit)."""
        return self._resting.changed() if self._resting is not None else []

    def replicated(self) -> dict[str, list[Tensor]]:
        """Returns the state that every rank holds alike, by kind: the weights in stages 0 to 2, all of it in stage 0."""
        self.wait_for_weights()
        weights: list[Tensor] = [] if self._stage == 3 else [*self._parameters.values()]
        return {"weights": weights, "moments": self._moments() if self._stage == 0 else []}

    def gradient_norm(self) -> float:
        """Returns the 2-norm of the last step's complete gradient, unscaled and before clipping (not collective)."""
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def loss_scale(self) -> float:
        """Returns fp16's loss scale; 1 in other precisions (not collective)."""
        return float(self.scaler_state().get("cur_scale", 1.0))

    def scaler_state(self) -> dict[str, Any]:
        """Returns the variables of fp16's dynamic loss scaler, for a checkpoint; else {} (not collective)."""
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if not hasattr(scaler, "cur_iter"):
            return {}
        return {name: getattr(scaler, name) for name in SCALER_NUMBERS}

    def set_scaler_state(self, state: dict[str, Any]) -> None:
        """Restores `scaler_state`; ignores the state of another precision (not collective)."""
        for name in self.scaler_state():
            if name in state:
                setattr(self._engine.optimizer.loss_scaler, name, state[name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns every parameter's full shape, tied ones once (not collective)."""
        # Stage 3 cuts them.
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}

    def fragments(self) -> list[Fragment]:
        """Returns this rank's part of the complete state, without any communication (not collective).

        Over all ranks the fragments tile every tensor exactly once. Frozen parameters have a weight only.
        """
        return sharded_state.fragments(self._pieces(), self._optimizer(), self._ranks.rank, self._ranks.num_ranks)

    def bit_sums(self) -> dict[str, int]:
        """Returns the sums of the complete state's bits by part; none with frozen weights, which a load may round."""
        if not all(parameter.requires_grad for parameter in self._parameters.values()):
            return {}
        return dict(zip(PARTS, self._ranks.all_reduce_sum(sums_by_part(self.fragments())).tolist(), strict=True))

    @property
    def objective(self) -> Objective:
        """The wrapped module; it holds all weights if `has_full_weights`."""
        self.wait_for_weights()
        module: Objective = self._engine.module
        return module

    @property
    def has_full_weights(self) -> bool:
        """True if each rank has all weights in the module itself, then callable directly (not collective)."""
        return self._stage < 3

    @torch.no_grad()
    def copy_weights(self, into: Mapping[str, Tensor]) -> None:
        """Fills tensors of any float type, by parameter name, with the complete weights; one at a time in fp32."""
        held = {fragment.name: fragment for fragment in self.fragments() if fragment.part == "weight"}
        for name, shape in self.shapes().items():
            whole = torch.zeros(math.prod(shape), device=self._ranks.device)
            if (mine := held.get(name)) is not None:
                whole[mine.start : mine.start + mine.values.numel()] = mine.values
            self._ranks.sum_on_device(whole)  # every element is held by one rank
            into[name].copy_(whole.view(shape))

    @torch.no_grad()
    def load(self, read: Callable[[str, str, int, int], Tensor | None], step: int) -> None:
        """Sets the complete state, on each rank its own part; between two steps.

        Args:
            read: `read(part, name, start, stop)` returns those elements of a flattened tensor as fp32 on the CPU, or
                None if there is no such tensor: then moments are zero and the moving average is the weight. It must
                return weights, or raise.
            step: number of updates so far.
        """
        self.wait_for_weights()
        optimizer = self._optimizer()
        for piece in self._pieces():
            parts = piece.parts(optimizer)
            for part, values in parts.items():  # the weight comes first
                saved = read(part, piece.name, piece.start, piece.start + piece.length)
                if saved is not None:
                    values.copy_(saved)
                elif part == "ema":
                    values.copy_(parts["weight"])
                else:
                    assert part != "weight", piece.name
                    values.zero_()
        for state in optimizer.state.values():
            state["step"].fill_(step)  # determines Adam's bias corrections
        self._updates = step
        sharded_state.sync_weights_from_masters(self._engine.optimizer, self._stage)
        if self._resting is not None:
            self._resting.note("state", self._state())

    def close(self) -> None:
        """Frees the memory of weights, gradients and state; no method may be called afterwards.

        It empties the tensors, as stage 3 keeps references to the whole engine in globals of DeepSpeed.
        """
        self.wait_for_weights()
        state = [tensor for held in self._optimizer().state.values() for tensor in held.values()]
        parameters = list(self._parameters.values())
        shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        held = [*self._masters(), *state, *parameters, *shards]
        self._engine.destroy()
        for tensor in held:
            tensor.grad, tensor.data = None, tensor.new_empty(0)

    def wait_for_weights(self) -> None:
        """Waits until the weights of all ranks have arrived, if they are gathered ahead (collective)."""
        if self._gather is not None:
            self._gather.wait()

    def _gradients(self) -> list[Tensor]:
        """Gradients of this step that lie in this rank's memory, and are not on the way."""
        if self._exchange is not None:
            held = [tensor for bucket in self._exchange.buckets for tensor in (bucket.flat, bucket.mean)]
        else:
            held = [parameter.grad for parameter in self._parameters.values()]
        return [tensor for tensor in held if tensor is not None]

    def _state(self) -> list[Tensor]:
        return [*self._masters(), *self._moments()]

    def _moments(self) -> list[Tensor]:
        states = self._optimizer().state.values()
        return [values for state in states for part, values in state.items() if part in PARTS]

    def _flat_weights(self) -> list[Tensor]:
        return self._engine.optimizer.bit16_groups_flat if self._gather is not None else []

    def _masters(self) -> list[Tensor]:
        return sharded_state.masters(self._engine.optimizer, self._stage)

    def _pieces(self) -> list[Shard]:
        return sharded_state.pieces(self._parameters, self._engine.optimizer, self._stage, self._ranks.rank)

    def _optimizer(self) -> Any:
        optimizer = self._engine.optimizer  # of DeepSpeed, perhaps around ours
        return getattr(optimizer, "optimizer", optimizer)
