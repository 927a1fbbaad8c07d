"""Sizes of a model and of its training state: plain arithmetic, so that no command needs torch for it."""

from typing import NamedTuple

from dist_transformer.config.schema import Config, ModelConfig, TrainingConfig

REDUCED_AT_ONCE = 2**26
"""Gradients, in elements, that DeepSpeed gathers into a buffer and reduces together: in stage 3, and with offload."""
SHARE_ON_THE_WAY = 0.25
"""Share of all gradients that may be on the way at once in stages 0 to 2 without offload. It takes memory; no network is
faster with more."""


def head_sizes(config: ModelConfig) -> tuple[int, int]:
    """Sizes of a head's queries and keys, and of its values (3.2.2)."""
    equal_share = config.d_model // config.num_heads
    return config.key_size or equal_share, config.value_size or equal_share


def has_final_norm(config: ModelConfig) -> bool:
    """True if a norm follows the last layer: pre-norm layers end in a sum without a norm."""
    return config.norm == "pre" if config.final_norm is None else config.final_norm


def norm_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names of a norm's parameters, each a vector of d_model numbers."""
    return {"layer": ("weight", "bias"), "rms": ("weight",)}[config.norm_type]


def feed_forward_matrices(config: ModelConfig) -> int:
    """Number of d_model x d_ff matrices in a feed-forward network: the two of equation 2, and SwiGLU's gate."""
    return {"relu": 2, "gelu": 2, "silu": 2, "swiglu": 3}[config.activation]


class Parameters(NamedTuple):
    """Numbers of parameters: of the layers, with the final norms, and of embeddings, learned positions and output."""

    of_layers: int
    of_others: int

    @property
    def total(self) -> int:
        return self.of_layers + self.of_others


def count_by_part(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> Parameters:
    """Number of trainable parameters of the network, each tied matrix counted once."""
    d_model, d_ff = config.d_model, config.d_ff
    norm = len(norm_tensors(config)) * d_model
    keys, values = (config.num_heads * size for size in head_sizes(config))
    attention = 2 * (d_model * (keys + values) + keys) + values + d_model + norm
    matrices = feed_forward_matrices(config)
    feed_forward = matrices * d_model * d_ff + (matrices - 1) * d_ff + d_model + norm
    encoder = config.num_encoder_layers * (attention + feed_forward)
    decoder = config.num_decoder_layers * (2 * attention + feed_forward)
    final_norms = 2 * norm if has_final_norm(config) else 0
    output_bias = target_vocabulary if config.output_bias else 0
    rows = source_vocabulary if config.shared_embeddings else source_vocabulary + target_vocabulary
    rows += 0 if config.tied_output else target_vocabulary
    if config.positions == "learned":
        rows += 2 * (config.max_positions or 0)
    return Parameters(encoder + decoder + final_norms, output_bias + rows * d_model)


def automatic_precision(has_gpu: bool) -> str:
    """Returns the value of `training.precision: auto`."""
    return "fp16" if has_gpu else "fp32"


def with_precision(config: Config, precision: str) -> Config:
    """Returns the configuration with `precision` in place of `training.precision: auto`."""
    if config.training.precision != "auto":
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"precision": precision})})


def effective_training(training: TrainingConfig, num_ranks: int) -> TrainingConfig:
    """Returns the section with the ZeRO stage that so many ranks use. One rank has nothing to shard: stage 0 trains to
    the same weights within rounding, faster and without the masters of stages 1 and 2, which 16-bit weights need."""
    has_short_weights = training.precision == "fp16" or has_bf16_layers(training)
    if num_ranks > 1 or training.zero_stage not in (1, 2) or has_short_weights or training.offload != "none":
        return training
    return training.model_copy(update={"zero_stage": 0})


def with_effective_zero_stage(config: Config, num_ranks: int) -> Config:
    """With `effective_training` in place of its section."""
    return config.model_copy(update={"training": effective_training(config.training, num_ranks)})


def lanes_of_pass(num_lanes: int, training: TrainingConfig, num_ranks: int) -> int:
    """Number of lanes that a rank computes in one pass, at most."""
    return min(training.lanes_per_pass, -(-num_lanes // num_ranks))


def state_of_rank(parameters: Parameters, training: TrainingConfig, num_ranks: int) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients, optimizer state and the buffer in which gradients are reduced, that a rank holds on its
    device: ZeRO, table 1, with the moving average where there is one. Without activations, and without the layers that stage 3
    has gathered.
    """
    stage, total, owned = training.zero_stage, parameters.total, -(-parameters.total // num_ranks)
    weights = bytes_of_weight(training) * owned if stage == 3 else weight_bytes(parameters, training)
    gradients = bytes_of_gradient(training) * (owned if stage >= 2 else total)
    optimizer = bytes_of_optimizer(training) * (owned if stage else total)
    if training.offload != "none":
        gradients, optimizer = 0 if stage == 3 else gradients, 0
    weights = 0 if training.offload == "optimizer_and_parameters" else weights
    return weights, gradients, optimizer, reduce_buffer_bytes(total, training, num_ranks)


def state_bytes(parameters: Parameters, training: TrainingConfig, num_ranks: int) -> int:
    """Bytes of all that `state_of_rank` has, without offloaded parts."""
    return sum(state_of_rank(parameters, training, num_ranks))


def reduce_buffer_bytes(parameters: int, training: TrainingConfig, num_ranks: int) -> int:
    """Bytes of gradients that a rank holds while it sends them, beside its own or its share of them."""
    if not sends_during_backward(training):
        return bytes_of_weight(training) * min(parameters, REDUCED_AT_ONCE)
    if num_ranks == 1 or training.zero_stage == 0:
        return 0
    copies = training.zero_stage  # what others send; in stage 2 what is sent, too, which stage 1 has anyway
    return round(SHARE_ON_THE_WAY * parameters * copies * bytes_of_sent_gradient(training))


def num_buckets(num_ranks: int) -> int:
    """Number of buckets in which gradients are sent during the backward pass, about.

    Many small ones begin early and end late; but each costs the latency of a collective, which grows with the ranks.
    """
    return min(16, max(4, 128 // num_ranks))


def sends_during_backward(training: TrainingConfig) -> bool:
    """True if gradients are sent while the backward pass goes on (training/engine/gradient_exchange.py)."""
    return training.zero_stage < 3 and training.offload == "none"


def offloaded_bytes(parameters: int, training: TrainingConfig, num_ranks: int) -> int:
    """Bytes that a rank holds in the CPU's memory for `training.offload`: masters, moments, fp32 gradients, and of the
    weights a copy to send (stages 1 and 2) or the only one (stage 3, where weights are offloaded too)."""
    if training.offload == "none":
        return 0
    has_weights = training.zero_stage < 3 or training.offload == "optimizer_and_parameters"
    gradients = 4 + (bytes_of_weight(training) if training.zero_stage == 3 else 0)  # stage 3: as received, too
    weights = bytes_of_weight(training) if has_weights else 0
    return round(parameters * (bytes_of_optimizer(training) + gradients + weights) / num_ranks)


def checkpoint_bytes(parameters: int, training: TrainingConfig) -> int:
    """Bytes of a checkpoint: fp32 weights, at most two moments and the moving average, for every precision and stage."""
    return parameters * (16 if training.ema_decay is not None else 12)


def checkpoints_bytes(config: Config, parameters: int) -> int:
    """Disk space of all checkpoints that a run has at once, at most.

    Beside those that `checkpoints` keeps: that of a stop, the one that is being written, and the newest ones that were
    damaged and that diverged. A run without `training.max_steps` is taken to be as long as the default one.
    """
    settings = config.checkpoints
    num_steps = config.training.max_steps or TrainingConfig().max_steps or 0
    for_good = num_steps // settings.keep_every_steps if settings.keep_every_steps else 0
    before_a_divergence = 2  # the newest is not enough to go back to
    kept = max(settings.keep_last, before_a_divergence) + settings.keep_best + for_good
    return checkpoint_bytes(parameters, config.training) * (kept + 4)


def staging_bytes(parameters: int, training: TrainingConfig, num_ranks: int) -> int:
    """Bytes that a rank holds in the CPU's memory for the copy that checkpoints are written from."""
    return round(checkpoint_bytes(parameters, training) / num_ranks)


def has_bf16_layers(training: TrainingConfig) -> bool:
    """True if the weights of layers are in bf16, and only the masters in fp32; else bf16 is autocast over fp32 weights.

    Stage 0 has no masters, nor have frozen weights; stage 3 and offload would sum gradients in bf16.
    """
    may_round = training.zero_stage > 0 and sends_during_backward(training) and not training.freeze
    return training.precision == "bf16" and may_round


def weight_bytes(parameters: Parameters, training: TrainingConfig) -> int:
    """Bytes of all weights that the forward pass uses."""
    of_others = 2 if training.precision == "fp16" else 4
    return bytes_of_weight(training) * parameters.of_layers + of_others * parameters.of_others


def bytes_of_weight(training: TrainingConfig) -> int:
    """Bytes of a weight of a layer in the forward pass."""
    return 2 if training.precision == "fp16" or has_bf16_layers(training) else 4


def bytes_of_sent_gradient(training: TrainingConfig) -> int:
    """Bytes of a gradient on its way to other ranks."""
    by_precision = 2 if training.precision == "fp16" else 4
    return 8 if training.same_bits else {"auto": by_precision, "fp32": 4, "bf16": 2}[training.communication_dtype]


def bytes_of_gradient(training: TrainingConfig) -> int:
    """Bytes of a gradient, summed over micro-batches: fp32, but in stage 3 and with offload as in the weights.

    With `same_bits` the sum is in fp64, and one rank, too, has it beside the gradients of a micro-batch.
    """
    if training.same_bits:
        return 8
    return 4 if sends_during_backward(training) else bytes_of_weight(training)


def bytes_of_optimizer(training: TrainingConfig) -> int:
    """Bytes per parameter of fp32 master, two moments and moving average; fp32 weights of stage 0 are the masters."""
    has_masters = training.zero_stage > 0 or training.precision == "fp16"
    return 8 + (4 if has_masters else 0) + (4 if training.ema_decay is not None else 0)
