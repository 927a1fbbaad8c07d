"""The largest micro-batch: its possible shapes, a dry run of them before training, and the search for its size.

    largest_shapes(DataConfig(max_tokens=8192, filters.max_tokens=128, ...))
    [32 x (128 + 128) tokens,     # the most attention: both sides at their longest
     63 x (13 + 117) tokens,      # the most target tokens: sources as short as the length ratio allows
     63 x (117 + 13) tokens]      # the most source tokens

A run that does not fit into memory thus ends in its first minute, and not at the first batch of long sentences.
"""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.model_size import has_bf16_layers, lanes_of_pass
from dist_transformer.config.schema import TrainingConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import UserError
from dist_transformer.planning.activations import Shape, unequal_sides
from dist_transformer.planning.memory import AUTO_MAX_TOKENS, AUTO_MULTIPLE_TOKENS
from dist_transformer.training import memory
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective, inputs_of

log = logging.getLogger(__name__)

SLOW_SECONDS = 20.0
"""Time of a pass at which the search stops on CPUs: no larger micro-batch is tried."""


def largest_shapes(data: DataConfig, at_once: int = 1) -> list[Shape]:
    """Returns the shapes with the most attention, target tokens and source tokens of any micro-batch of `data`, or of so
    many that are computed at once: they have the rows of all of them.

    A micro-batch has the lengths of its longest rows, and as many rows as the budget holds. A pair of these two
    lengths would pass the filters too: the other side of a row that is longest on one side is never longer than them.
    """
    budget = data.token_budget()
    shorter, longer = unequal_sides(data)
    even = (shorter + longer) // 2, -(-(shorter + longer) // 2)  # the sides with the largest product
    sides = [(shorter, longer), (longer, shorter), even, even[::-1]]
    source, target = np.unique(np.concatenate(sides, axis=1), axis=1)  # sorted
    rows = np.maximum(1, budget // (source + target))
    tokens = rows * (source + target)
    of_a_row = [source * source + source * target + target * target, source * target, target, source]
    sizes = [*(rows * size for size in of_a_row), tokens]
    places: list[int] = []
    for size in sizes:
        if not places or size[places].max() < size.max():  # else a shape chosen before is as large
            places.append(int(np.argmax(size * (budget + 1) + tokens)))  # among equals the one with the most tokens
    return [Shape(at_once * int(rows[i]), int(source[i]), int(target[i])) for i in places]


def dry_run(
    engine: Engine, shapes: Sequence[Shape], ranks: Ranks, token_id: int, progress: Callable[[str], None]
) -> None:
    """Runs one forward and backward pass on each shape (collective). The gradient is exactly zero, so that training is
    the same with and without it. `token_id`: any but padding. `progress` is called with a text for each shape. Raises
    UserError: this rank is out of memory."""
    engine.train()
    started = time.monotonic()
    memory.begin_peak(ranks.device)
    for shape in shapes:
        doing = f"the dry run of the largest micro-batch, {shape}"
        progress(doing)
        with memory.explaining_out_of_memory(doing, ranks.device):
            loss, _ = engine(*_inputs(shape, token_id, ranks.device))
            # Zero times a number is zero; zero times infinity would be in every gradient of the first step.
            if ranks.all_reduce_sum(torch.isfinite(loss.detach()).cpu().long()) == ranks.num_ranks:
                engine.backward(loss * 0.0, 1)
            else:
                log.warning("dry run    %s: the loss is not finite, so that no gradient was taken", shape)
            del loss
    log.info(
        "dry run    of the largest micro-batches, %s: %s at most, %.1f s",
        ", ".join(map(str, shapes)), memory.as_text(memory.peak(ranks.device)), time.monotonic() - started,
    )  # fmt: skip
    memory.give_back(ranks.device)


def find_max_tokens(
    module: Objective,
    state_bytes: int,
    data: DataConfig,
    ranks: Ranks,
    training: TrainingConfig,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Finds the largest `data.max_tokens` whose micro-batches fit into the memory of every rank (collective).

    Each rank tries growing micro-batches on a copy of the plain module, before there is an engine: no rank waits for
    one that is out of memory. Memory grows linearly with the tokens, so the last two sizes predict the next. Raises
    UserError: two sentences of data.filters.max_tokens do not fit on some rank; raised on every rank.

    Args:
        state_bytes: weights, gradients and optimizer state of a rank in training.
        progress: called before each micro-batch.
    """
    # state_bytes includes the weights, and the module's weights are in memory already.
    held = 0 if ranks.device.type == "cuda" else sum(p.numel() * p.element_size() for p in module.parameters())
    found = memory.allowance(ranks)
    for_activations = memory.Allowance(found.bytes + held - state_bytes, found.limited_by)
    smallest, at_once = 2 * data.filters.max_tokens, lanes_of_pass(data.lanes, training, ranks.num_ranks)
    probe: _Probe | None = None

    def measure(budget: int) -> tuple[int, float] | None:
        nonlocal probe
        shapes = largest_shapes(data.model_copy(update={"max_tokens": budget}), at_once)
        try:
            probe = probe or _Probe(module, ranks.device, training)
            return probe.measure(shapes, progress)
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error):
                raise
            return None

    ranks.barrier()  # no rank fills memory before all have measured the free memory
    # A GPU may not recover.
    with memory.explaining_out_of_memory("the search for the largest data.max_tokens", ranks.device):
        growth, limit_bytes = Growth(smallest), for_activations.bytes
        if limit_bytes > 0:
            growth = grow(smallest, measure, limit_bytes, may_be_slow=ranks.device.type == "cpu")
        probe = None  # its memory is given back
        memory.give_back(ranks.device)
    answers = ranks.all_gather_object((growth.most_tokens(for_activations.bytes), growth, for_activations))
    tokens, growth, limit = min(answers, key=lambda answer: answer[0])
    total = f"{memory.as_text(limit.bytes + state_bytes)} ({limit.limited_by})"
    if not tokens:
        kept = f"{memory.as_text(memory.RESERVED_ADDRESS_BYTES)} are kept for addresses of libraries"
        advice = f"Raise ulimit -v, of which {kept}, or lower" if limit.limited_by == "ulimit -v" else "Lower"
        raise UserError(
            f"data.max_tokens: auto found no size that fits: not even one pair of data.filters.max_tokens = "
            f"{data.filters.max_tokens} on both sides fits into the {total} that a rank may use, "
            f"{memory.as_text(state_bytes)} of them for weights, gradients and optimizer. {advice} data.filters.max_tokens, set "
            "training.activation_checkpointing=true, a higher training.zero_stage or training.offload=optimizer, or take a "
            "smaller model"
        ).agreed()
    log.info(
        "max_tokens %s found: %s of %s%s", f"{tokens:,}", memory.as_text(growth.peak_bytes(tokens) + state_bytes), total,
        f"; larger ones take more than {SLOW_SECONDS:.0f} s" if growth.is_slow else "",
    )  # fmt: skip
    return int(tokens)


@dataclass(frozen=True)
class Growth:
    """Measured bytes of activations at growing budgets.

    Attributes:
        smallest: the first budget tried, and the minimum.
        measured: (budget, bytes) of each measurement.
        too_large: a budget that ran out of memory; AUTO_MAX_TOKENS + 1 if none did.
        is_slow: a larger micro-batch would take too long.
    """

    smallest: int
    measured: tuple[tuple[int, int], ...] = ()
    too_large: int = AUTO_MAX_TOKENS + 1
    is_slow: bool = False

    def peak_bytes(self, tokens: int) -> int:
        """Extrapolates the bytes at a budget from the last two measurements. The slope is at least half that of a line
        from zero: the first small steps of a process may reuse memory that it has.
        """
        last_tokens, last_bytes = self.measured[-1]
        return round(last_bytes + (tokens - last_tokens) * self._bytes_per_token())

    def most_tokens(self, limit_bytes: int) -> int:
        """Returns the largest budget within the limit, a multiple of AUTO_MULTIPLE_TOKENS or the smallest; 0: none."""
        if not self.measured:
            return 0
        last_tokens, last_bytes = self.measured[-1]
        fits = last_tokens + int((limit_bytes - last_bytes) // max(self._bytes_per_token(), 1e-9))
        most = min(fits, self.too_large - 1, last_tokens if self.is_slow else AUTO_MAX_TOKENS)
        if most < self.smallest:
            return 0
        return max(most // AUTO_MULTIPLE_TOKENS * AUTO_MULTIPLE_TOKENS, self.smallest)

    def _bytes_per_token(self) -> float:
        last_tokens, last_bytes = self.measured[-1]
        if len(self.measured) == 1:
            return last_bytes / last_tokens
        tokens, at_tokens = self.measured[-2]
        return max((last_bytes - at_tokens) / (last_tokens - tokens), 0.5 * last_bytes / last_tokens)


Measure = Callable[[int], tuple[int, float] | None]


def grow(smallest: int, measure: Measure, limit_bytes: int, may_be_slow: bool) -> Growth:
    """Doubles the budget from `smallest` on, as long as the next one is expected to be within both limits. `measure`
    returns bytes and seconds of a budget, None when out of memory."""
    growth, tokens = Growth(smallest), smallest
    while True:
        measured = measure(tokens)
        if measured is None:
            return Growth(smallest, growth.measured, tokens)
        in_use, seconds = measured
        growth = Growth(smallest, (*growth.measured, (tokens, in_use)), is_slow=may_be_slow and seconds > SLOW_SECONDS)
        following = min(2 * tokens, AUTO_MAX_TOKENS)
        if growth.is_slow or following <= tokens or growth.peak_bytes(following) > limit_bytes:
            return growth
        tokens = following


class _Probe:
    """A temporary copy of the module with its gradients, on the device and in the precision of the engine."""

    def __init__(self, module: Objective, device: torch.device, training: TrainingConfig) -> None:
        self._device = device
        self._token_id = int(module.model.pad_id == 0)
        self._module = copy.deepcopy(module).to(device, torch.float16 if training.precision == "fp16" else None).train()
        if has_bf16_layers(training):
            self._module.round_layers()
        for parameter in self._module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        memory.give_back(device)
        self._before = memory.begin_peak(device)

    def measure(self, shapes: Sequence[Shape], progress: Callable[[], None]) -> tuple[int, float]:
        """Returns (bytes above the module and its gradients, seconds of the slowest pass)."""
        slowest = 0.0
        for shape in shapes:
            progress()
            started = time.monotonic()
            loss, _ = self._module(*_inputs(shape, self._token_id, self._device))
            loss.backward()
            del loss
            most = memory.peak(self._device)  # waits for the GPU
            slowest = max(slowest, time.monotonic() - started)
        return max(0, most - self._before), slowest


def _inputs(shape: Shape, token_id: int, device: torch.device) -> Any:
    """Returns those of an `Objective` for a micro-batch without padding, so that every position is part of the loss."""
    source, target = (torch.full((shape.rows, n), token_id) for n in (shape.source_length, shape.target_length))
    size = BatchShape(*shape, shape.rows, source.numel(), target.numel())
    return inputs_of([MicroBatch(-1, size, source, target, target, torch.zeros(0))], device)
