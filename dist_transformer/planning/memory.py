"""Memory of a rank, part by part, for any ZeRO stage and number of ranks: its peak, and whether it fits.

The peak is the largest of four moments: the end of the forward pass, with all activations and the logits; the beginning
of the backward pass; its end, with all gradients; the update. The memory of each stage of DeepSpeed 0.19.8 at these
moments was measured on 1 and 2 ranks; benchmarks/memory_plan.py checks the formulas against it.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from dist_transformer.config import model_size
from dist_transformer.config.schema import Config, TrainingConfig
from dist_transformer.planning.activations import Activations, Shape, activations, largest_shape, token_bytes
from dist_transformer.planning.vocabularies import parameters_by_part, vocabulary_sizes

USABLE_SHARE = 0.9
"""Share of a GPU's memory that a rank may use: the rest is for the buffers of communication and fragmentation."""
LIVE_AT_ONCE, FETCHED_AT_ONCE = 10**9, 5 * 10**7
"""Elements of weights that stage 3 keeps gathered, and gathers with one collective: DeepSpeed's defaults."""
AUTO_MAX_TOKENS, AUTO_MULTIPLE_TOKENS = 65_536, 256
"""Upper limit and step of `data.max_tokens: auto`: larger micro-batches are not faster on any device."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank.

    Attributes:
        parts: the memory of each part by name; not all exist at once.
        moments: the memory in use at each moment by name.
        cpu_bytes: CPU memory: the offloaded state, and the copy from which checkpoints are written.
    """

    shape: Shape
    parts: dict[str, int]
    moments: dict[str, int]
    cpu_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.moments.values())

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda moment: self.moments[moment])


def memory_of_rank(
    config: Config, num_ranks: int, *, shape: Shape | None = None, on_gpu: bool = True, micro_batches: int | None = None
) -> RankMemory:
    """Memory of a rank in training.

    Args:
        shape: shape of what a pass computes; default: the largest that `data` can give, for each lane of a pass.
        micro_batches: micro-batches of a rank in a step; default: as many as its lanes.
    """
    by_part, (source_vocabulary, vocabulary) = parameters_by_part(config), vocabulary_sizes(config)
    at_once = model_size.lanes_of_pass(config.data.lanes, config.training, num_ranks)
    if shape is None:
        shape = largest_shape(config.data, config.data.token_budget(), *token_bytes(config, on_gpu))
        shape = shape._replace(rows=shape.rows * at_once)
    batch = activations(config, vocabulary, shape, on_gpu)
    state = _State.of(by_part, source_vocabulary * config.model.d_model, config.training, num_ranks)
    num_micro_batches = micro_batches or -(-config.data.lanes // num_ranks)
    is_repeated = num_micro_batches > at_once or config.training.audit_share > 0  # an audit is one more
    moments_of = _moments_of_exchange if model_size.sends_during_backward(config.training) else _moments
    moments = moments_of(state, batch, config.training.zero_stage, config.training.precision, is_repeated)
    of_cpu = (by_part.total, config.training, num_ranks)
    cpu = model_size.offloaded_bytes(*of_cpu) + model_size.staging_bytes(*of_cpu)
    parts = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "reduce_buffer": state.buffer,
        "gathered_weights": state.gathered + state.fetched,
        "activations": batch.kept + batch.weight_copies,
        "recomputed_layer": batch.recomputed,
        "logits": batch.logits,
    }
    return RankMemory(shape, parts, moments, cpu)


@dataclass(frozen=True)
class _State:
    """Bytes of the training state on the device.

    Attributes:
        flat: a copy in fp32 of all gradients of a rank's part.
        embedding: gradient of the source embedding, as the backward pass makes it.
    """

    weights: int
    gradients: int
    optimizer: int
    buffer: int
    gathered: int
    fetched: int
    flat: int
    embedding: int
    share_reduced_at_once: float

    @classmethod
    def of(
        cls, by_part: model_size.Parameters, of_embedding: int, training: TrainingConfig, num_ranks: int
    ) -> "_State":
        stage, offload, parameters = training.zero_stage, training.offload, by_part.total
        width = 2 if training.precision == "fp16" else 4  # of an embedding
        is_gathered = stage == 3 and (num_ranks > 1 or offload == "optimizer_and_parameters")
        at_once = min(parameters, model_size.REDUCED_AT_ONCE)
        is_copied = stage > 0 or num_ranks > 1 or training.same_bits
        return cls(
            *model_size.state_of_rank(by_part, training, num_ranks),
            gathered=width * min(parameters, LIVE_AT_ONCE) if is_gathered else 0,
            fetched=width * min(parameters, FETCHED_AT_ONCE) if is_gathered else 0,
            flat=4 * -(-parameters // num_ranks) if offload == "none" and stage > 0 else 0,
            embedding=width * of_embedding if is_copied else 0,
            share_reduced_at_once=at_once / parameters,
        )


def _moments_of_exchange(
    state: _State, batch: Activations, stage: int, precision: str, is_repeated: bool
) -> dict[str, int]:
    """Stages 0 to 2: gradients are summed in fp32 from the first micro-batch on, stage 2's in shares; the last one, of
    the embedding, lies beside its copy while it is taken over. The last ones sent are on the way when the next pass begins."""
    always, kept = state.weights + state.optimizer, batch.kept + batch.weight_copies
    left = state.gradients + (state.buffer if stage == 2 else 0) if is_repeated else 0
    last = state.embedding if stage < 2 else state.embedding + 4 * state.embedding // (2 if precision == "fp16" else 4)
    return {
        "forward": always + left + kept + batch.logits,
        "backward": always + left + kept + batch.recomputed + batch.first_gradients,
        "gradients": always + state.gradients + state.buffer + last,
        "update": always + (state.flat if stage else state.gradients) + state.buffer,
    }


def _moments(state: _State, batch: Activations, stage: int, precision: str, is_repeated: bool) -> dict[str, int]:
    """Stage 3 and offload: DeepSpeed's own exchange."""
    always = state.weights + state.optimizer + (state.gradients + state.buffer if stage == 3 else 0)
    # Memory left by earlier micro-batches of the step: stage 1 reduces once a step and keeps its buffer until then.
    left = state.gradients + (state.buffer if stage == 1 else 0) if is_repeated and stage < 3 else 0
    buffer = 0 if stage == 3 or (stage == 1 and is_repeated) else state.buffer
    kept = batch.kept + batch.weight_copies
    # Stage 1: gradients and buffer. Stage 2: the buffer, which holds the gradients, and the flat copy to be sent.
    # Stage 3: besides the buffer that copy, and the one that gloo makes of it (NCCL is assumed to make one, too).
    reducing = 2 * state.buffer if stage >= 2 else state.gradients + state.buffer
    first_reduced = round((1 - state.share_reduced_at_once) * (kept + state.gathered)) if stage > 1 else 0
    # The last gathered buffer is freed with the last layer whose weights it holds, before the logits are computed.
    return {
        "forward": always + left + kept + state.gathered + max(batch.logits, state.fetched),
        "backward": always + left + buffer + kept + batch.recomputed + batch.first_gradients + state.gathered,
        "gradients": always + (left if stage == 2 else 0) + reducing + first_reduced,
        # Stage 3 has its gradients in fp32 besides, and as a copy in fp16; offload none of them. Adam is one kernel.
        "update": always + state.flat + (state.flat // 2 if precision == "fp16" and stage == 3 else 0),
    }


def with_tokens(config: Config, max_tokens: int) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"max_tokens": max_tokens})})


def most_tokens(config: Config, num_ranks: int, memory_bytes: float) -> int:
    """Largest `data.max_tokens` that fits into `memory_bytes`, a multiple of 256; 0 if not even one pair fits."""
    smallest = 2 * config.data.filters.max_tokens

    def is_too_large(tokens: int) -> bool:
        return memory_of_rank(with_tokens(config, tokens), num_ranks).peak_bytes > memory_bytes

    sizes = range(AUTO_MULTIPLE_TOKENS, AUTO_MAX_TOKENS + 1, AUTO_MULTIPLE_TOKENS)
    num_fitting = bisect_left(sizes, True, key=is_too_large)
    tokens = max(num_fitting * AUTO_MULTIPLE_TOKENS, smallest)
    return 0 if is_too_large(tokens) else tokens


def with_token_budget(config: Config, num_ranks: int, memory_gb: float) -> Config:
    """Replaces `data.max_tokens: auto` by the largest number that fits, or the smallest possible if nothing fits."""
    if config.data.max_tokens != "auto":
        return config
    tokens = most_tokens(config, num_ranks, memory_gb * 1e9 * USABLE_SHARE)
    return with_tokens(config, tokens or 2 * config.data.filters.max_tokens)


def memory_problem(config: Config, num_ranks: int, memory_gb: float) -> str | None:
    """Message why a run of `num_ranks` ranks does not fit into GPUs of `memory_gb`, with a remedy; None if it fits.
    With `data.max_tokens: auto` a run fits if the smallest micro-batch does."""
    config = model_size.with_precision(config, model_size.automatic_precision(has_gpu=True))
    config = model_size.with_effective_zero_stage(config, num_ranks)
    config = with_token_budget(config, num_ranks, memory_gb)
    memory, usable = memory_of_rank(config, num_ranks), memory_gb * 1e9 * USABLE_SHARE
    if memory.peak_bytes <= usable:
        return None
    return (
        f"a rank needs about {memory.peak_bytes / 1e9:.1f} GB, most in its {memory.fullest} with a micro-batch of "
        f"{memory.shape}, and {USABLE_SHARE:.0%} of the GPU's {memory_gb:g} GB are {usable / 1e9:.1f} GB; "
        f"{remedy(config, num_ranks, memory_gb)}"
    )


def remedy(config: Config, num_ranks: int, memory_gb: float) -> str:
    """First change that makes the run fit: a single one, then all together, then fewer tokens."""
    usable, training = memory_gb * 1e9 * USABLE_SHARE, config.training
    changes: list[dict[str, Any]] = [{"zero_stage": stage} for stage in (2, 3) if training.zero_stage < stage]
    if not training.activation_checkpointing:
        changes.insert(0, {"activation_checkpointing": True})
    if training.offload == "none" and training.zero_stage > 0:
        changes.append({"offload": "optimizer"})
    together = {key: value for change in changes for key, value in change.items()}

    def changed(change: dict[str, Any]) -> Config:
        return config.model_copy(update={"training": training.model_copy(update=change)})

    for change in [*changes, together]:
        if memory_of_rank(changed(change), num_ranks).peak_bytes <= usable:
            return f"it fits with {_settings(change)}"
    if tokens := most_tokens(config, num_ranks, usable):
        return f"it fits with data.max_tokens={tokens}"
    if tokens := most_tokens(changed(together), num_ranks, usable):
        return f"it fits with {_settings(together)} data.max_tokens={tokens}"
    return "no setting makes it fit: take a smaller model or GPUs of more memory"


def _settings(change: dict[str, Any]) -> str:
    return " ".join(f"training.{key}={'true' if value is True else value}" for key, value in change.items())
