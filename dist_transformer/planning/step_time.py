"""Time of a step: arithmetic of the GPUs, the collectives that it does not hide, then the update: docs/scaling.md.

A token takes 6 FLOPs per matrix element (2 forward, 4 backward), 8 if layers are recomputed in the backward pass. What each
stage sends was observed on 2 ranks; offload all-reduces gradients (stage 2 for each micro-batch) and all-gathers weights.
"""

from dataclasses import dataclass, replace

from dist_transformer.config import model_size
from dist_transformer.config.schema import Config
from dist_transformer.planning.flops import model_flops
from dist_transformer.planning.hardware import GIVEN, Constant, Hardware
from dist_transformer.planning.vocabularies import count_parameters, parameters_by_part, vocabulary_sizes

FILLED_SHARE = 0.93
"""Share of data.max_tokens that are real tokens, not padding or unused. Assumed; the log has `padding_share`."""
MEAN_TOKENS = 32
"""Sentence length for the attention terms. Assumed."""
BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a micro-batch's arithmetic: two products for each one of the forward pass."""
UPDATE_BYTES = 32
"""Bytes that Adam in fp32 reads and writes for a parameter: gradient, master and two moments, weight."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and its tokens.

    Attributes:
        communication_seconds: of collectives that no arithmetic hides.
        idle_share: idle share of the ranks' time if the lanes are no multiple of the ranks.
        target_tokens: real target tokens of all lanes.
    """

    micro_batches: int
    compute_seconds: float
    communication_seconds: float
    update_seconds: float
    idle_share: float
    target_tokens: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.update_seconds

    @property
    def communication_share(self) -> float:
        return self.communication_seconds / self.seconds

    @property
    def efficiency(self) -> float:
        """Share of the ranks' time spent on micro-batches with tokens."""
        return self.compute_seconds * (1 - self.idle_share) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.target_tokens / self.seconds


def step_time(config: Config, num_ranks: int, ranks_per_node: int, hardware: Hardware) -> StepTime:
    """Time of a step of `num_ranks` ranks, which may not exceed the lanes."""
    lanes, budget = config.data.lanes, config.data.token_budget()
    micro_batches = -(-lanes // num_ranks)
    passes = -(-micro_batches // model_size.lanes_of_pass(lanes, config.training, num_ranks))
    flops = micro_batches * micro_batch_flops(config, budget / 2, budget / 2)
    compute_seconds = flops / (hardware.achieved_tflops(config.training.precision) * 1e12)
    pass_seconds = compute_seconds / passes
    owned = count_parameters(config) / (num_ranks if config.training.zero_stage else 1)
    return StepTime(
        micro_batches=micro_batches,
        compute_seconds=compute_seconds,
        communication_seconds=exposed_seconds(config, num_ranks, ranks_per_node, passes, pass_seconds, hardware),
        update_seconds=owned * UPDATE_BYTES / (hardware.memory_gb_per_second.value * 1e9),
        idle_share=1 - lanes / (num_ranks * micro_batches),
        target_tokens=lanes * budget / 2 * FILLED_SHARE,
    )


def with_given_rates(
    hardware: Hardware,
    config: Config,
    ranks_per_node: int,
    tokens_per_second: float | None,
    all_reduce_gb_per_second: float | None,
) -> Hardware:
    """Hardware with rates measured by the user; None: as in `hardware`.

    Args:
        tokens_per_second: real target tokens of a single rank that waits for no other, as in its log.
        all_reduce_gb_per_second: between nodes, as preflight prints it: 2 (n - 1) / n x bytes / seconds.
    """
    if tokens_per_second is not None:
        tflops = tokens_per_second * micro_batch_flops(config, 1, 1) / FILLED_SHARE / 1e12
        rate, whole = Constant(tflops, GIVEN), Constant(1.0, GIVEN)
        hardware = replace(hardware, half_tflops=rate, single_tflops=rate, matmul_share=whole, model_share=whole)
    if all_reduce_gb_per_second is not None:  # the ranks of a node share its network
        hardware = replace(hardware, network_gb_per_second=Constant(all_reduce_gb_per_second / ranks_per_node, GIVEN))
    return hardware


def micro_batch_flops(config: Config, source_tokens: float, target_tokens: float) -> float:
    """FLOPs of forward and backward pass; padding counts, because it is multiplied like any token."""
    pairs = source_tokens / MEAN_TOKENS
    flops = model_flops(config.model, vocabulary_sizes(config)[1], pairs, source_tokens, target_tokens)
    again = 8 / 6 if config.training.activation_checkpointing else 1.0
    return again * (flops.projections + flops.scores + flops.feed_forward) + flops.output


def exposed_seconds(
    config: Config, num_ranks: int, ranks_per_node: int, passes: int, pass_seconds: float, hardware: Hardware
) -> float:
    """Time of the collectives of a step that its `passes`, forward and backward, of `pass_seconds` do not hide."""
    if num_ranks == 1:
        return 0.0
    training, parameters = config.training, count_parameters(config)
    bandwidth = hardware.link_gb_per_second.value
    if num_ranks > ranks_per_node:
        bandwidth = min(bandwidth, ranks_per_node * hardware.network_gb_per_second.value)
    seconds_per_byte = (num_ranks - 1) / num_ranks / (bandwidth * 1e9)
    sent = parameters * model_size.bytes_of_sent_gradient(training) * seconds_per_byte
    gathered = model_size.weight_bytes(parameters_by_part(config), training) * seconds_per_byte
    # Reduce-scatters of all gradients, and all-gathers of all weights; an all-reduce of gradients counts as two.
    twice = 1 if model_size.sends_during_backward(training) else 2
    halves = ((2, 0), (twice, 1), (twice * passes, 1), (passes, 2 * passes))[training.zero_stage]
    latency = (num_ranks - 1) * hardware.latency_seconds.value
    if not model_size.sends_during_backward(training):
        collectives = -(-parameters // model_size.REDUCED_AT_ONCE)
        if training.zero_stage == 3:  # gathered layer by layer
            collectives = max(collectives, config.model.num_encoder_layers + config.model.num_decoder_layers)
        return halves[0] * sent + halves[1] * gathered + sum(halves) * collectives * latency
    embedding = vocabulary_sizes(config)[0] * config.model.d_model
    buckets, backward = model_size.num_buckets(num_ranks), BACKWARD_SHARE * pass_seconds
    often = passes if training.zero_stage == 2 else 1
    whole = halves[0] // often  # 2 for an all-reduce
    last = embedding / parameters * sent + latency
    gradients = often * whole * max(last, sent + buckets * latency - (1 - 1 / buckets) * backward / whole)
    first = embedding * (2 if training.precision == "fp16" else 4) * seconds_per_byte + latency
    return gradients + halves[1] * max(first, gathered + buckets * latency - (pass_seconds - backward))
