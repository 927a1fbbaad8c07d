"""Gradients of ZeRO 0 to 2, averaged over the ranks while the backward pass goes on, and weights gathered for the next.

    backward   | decoder 5 | decoder 4 | decoder 3 | ... | embedding |
    network                | bucket 0  | bucket 1  | ...       | last |  norm, update  | weights, embedding first

docs/architecture.md ("A step") says what DeepSpeed does otherwise, and what is left to it. A bucket is one of Adam's groups,
which DeepSpeed lays out in one flat tensor.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_transformer.config.model_size import SHARE_ON_THE_WAY
from dist_transformer.distributed.group import Fetched, Pending, Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine.fixed_point import sum_with, sums_of_squares
from dist_transformer.training.engine.muon import moved, orthogonalize

LEAST_ELEMENTS = 2**18
"""Elements of a bucket, at least: below that latency counts more than bytes."""


def in_order_of_backward(model: Transformer) -> list[nn.Parameter]:
    """Returns the trained parameters in the order in which a backward pass completes their gradients.

    A tied parameter comes where it is used first, because its gradient is complete last.
    """
    used = dict.fromkeys(parameter for part in model.in_order_of_use() for parameter in part.parameters())
    used |= dict.fromkeys(model.parameters())  # what is used after all layers
    return [parameter for parameter in reversed(used) if parameter.requires_grad]


def in_buckets(count: int, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cuts parameters into about `count` buckets, in their order; one that fills a bucket is alone in it."""
    least = max(sum(p.numel() for p in parameters) // count, LEAST_ELEMENTS)
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if buckets[-1] and (size >= least or parameter.numel() >= least):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets


class Bucket:
    """Parameters whose gradients are sent together, in one flat tensor of `size` elements.

    Attributes:
        is_fixed_point: gradients are summed in fixed point, in fp64: to the same bits in every order.
        flat: this rank's gradient, summed over the micro-batches since it was last sent; None if there is none.
        mean: the mean over the ranks of what was sent in this step, in fp32, or the sum in fixed point: all of it, or
            this rank's share.
        missing: parameters whose gradient the backward pass has not completed.
        sent: what is on its way to the other ranks; None if nothing is.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], size: int, is_fixed_point: bool = False) -> None:
        self.parameters, self.size, self.is_fixed_point = parameters, size, is_fixed_point
        self.flat: Tensor | None = None
        self.mean: Tensor | None = None
        self.missing = 0
        self.sent: Pending | None = None

    def take_gradients(self) -> None:
        """Moves the parameters' gradients into `flat`."""
        first, before = self.parameters[0], self.flat
        if before is not None and first.dtype == before.dtype:
            self._combine(torch._foreach_add_, before)
        else:  # adding other types would be an operation for each parameter
            self.flat = torch.zeros(self.size, device=first.device)
            self._combine(torch._foreach_copy_, self.flat)
            if self.is_fixed_point:
                self.flat = sum_with(before, self.flat)
            elif before is not None:
                self.flat += before
        for parameter in self.parameters:
            parameter.grad = None

    def _combine(self, combine: Callable[..., None], flat: Tensor) -> None:
        pairs = zip(self.views_of(flat), self.parameters, strict=True)
        held = [(view, p.grad) for view, p in pairs if p.grad is not None]
        if held:
            combine([view for view, _ in held], [gradient for _, gradient in held])

    def send(self, ranks: Ranks, into_shares: bool, dtype: torch.dtype) -> None:
        """Begins averaging `flat` over the ranks (collective)."""
        self.receive()
        flat, self.flat = self.flat, None
        assert flat is not None
        flat = flat if ranks.num_ranks == 1 or self.is_fixed_point else flat.to(dtype)
        self.sent = ranks.start_mean(flat, into_shares, self.is_fixed_point)

    def receive(self) -> None:
        """Waits until what was sent is in `mean` (collective)."""
        if self.sent is not None:
            mean, self.sent = self.sent.wait(), None
            self.mean = mean if self.mean is None else self.mean.add_(mean)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns the parts of a flat tensor that belong to the parameters, in their shapes."""
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(flat[: sum(sizes)], sizes)
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]


class GradientExchange:
    """Averages the gradients of all ranks, bucket by bucket, each as soon as it is complete.

    The buckets are sent in their order on every rank, whatever the order in which gradients come.
    """

    def __init__(self, buckets: Sequence[Bucket], ranks: Ranks, stage: int, dtype: torch.dtype) -> None:
        """`stage`: of ZeRO; stage 0 averages whole gradients. `dtype`: the type in which gradients are sent."""
        self.buckets, self._ranks, self._stage, self._dtype = buckets, ranks, stage, dtype
        self._is_sending, self._next = False, 0
        self._most_on_the_way = SHARE_ON_THE_WAY * sum(bucket.size for bucket in buckets)
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._completed, bucket))  # type: ignore[no-untyped-call]

    def begin_backward(self, is_last: bool) -> None:
        """To be called before a backward pass. Stages 0 and 1 send in the last one of a step; stage 2 keeps only its
        share, and sends in each."""
        self._is_sending, self._next = is_last or self._stage == 2, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def end_backward(self) -> None:
        """To be called after a backward pass, in which some parameters may have got no gradient (collective)."""
        for bucket in self.buckets:
            if bucket.missing:
                bucket.missing = 0
                bucket.take_gradients()
        self._send()

    def means(self) -> list[Tensor]:
        """Waits for the mean gradient of each bucket: whole in stage 0, else this rank's share (collective)."""
        for bucket in self.buckets:
            if bucket.flat is not None:
                bucket.send(self._ranks, self._stage > 0, self._dtype)
        for bucket in self.buckets:
            bucket.receive()
        return [bucket.mean.float() for bucket in self.buckets if bucket.mean is not None]

    def hand_over(self) -> None:
        """Gives each parameter its mean gradient, in stage 0 (collective)."""
        for bucket, mean in zip(self.buckets, self.means(), strict=True):
            for view, parameter in zip(bucket.views_of(mean), bucket.parameters, strict=True):
                parameter.grad = view
        self.release()

    def release(self) -> None:
        """Forgets the gradients of the step."""
        for bucket in self.buckets:
            bucket.flat = bucket.mean = None

    def _completed(self, bucket: Bucket, _parameter: Tensor) -> None:
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.take_gradients()
            self._send()

    def _send(self) -> None:
        while self._is_sending and self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._make_room()
            self.buckets[self._next].send(self._ranks, self._stage > 0, self._dtype)
            self._next += 1

    def _make_room(self) -> None:
        """Takes what has arrived, and waits for the oldest gradients if too many are on the way."""
        on_the_way = sum(bucket.size for bucket in self.buckets if bucket.sent is not None)
        for bucket in self.buckets:
            if bucket.sent is not None and (bucket.sent.is_done or on_the_way > self._most_on_the_way):
                bucket.receive()
                on_the_way -= bucket.size


class WeightGather:
    """Gathers the weights that stages 1 and 2 update in parts, in the order of their use by the next forward pass.

    A layer waits for its own weights only: the rest is on its way while the next batch is copied and computed.

    Attributes:
        arrived: called with the number of each bucket whose weights have arrived.
    """

    def __init__(self, objective: nn.Module, model: Transformer, buckets: Sequence[Bucket], ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: dict[int, Pending] = {}
        self.arrived: Callable[[int], None] = lambda number: None
        bucket_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket.parameters}
        unit: nn.Module = objective
        needed: dict[nn.Module, set[int]] = {}
        layers = {*model.encoder_layers, *model.decoder_layers}
        for part in [*model.in_order_of_use(), model]:  # what is used between two layers is waited for before the first
            unit = part if part in layers else unit
            found = {bucket_of[p] for p in part.parameters() if p in bucket_of}
            needed.setdefault(unit, set()).update(found)
        for unit, numbers in needed.items():
            unit.register_forward_pre_hook(partial(self._before_use, sorted(numbers, reverse=True)))

    def start(self, flats: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
        """Begins gathering: each rank gives its part `mine` of every flat tensor (collective)."""
        for number in reversed(range(len(flats))):
            self._pending[number] = self._ranks.start_gather(flats[number], mine[number])

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Waits for the weights of the given buckets, or all (collective)."""
        for number in list(self._pending) if numbers is None else numbers:
            if (pending := self._pending.pop(number, None)) is not None:
                pending.wait()
                self.arrived(number)

    def _before_use(self, numbers: list[int], _module: nn.Module, _inputs: Any) -> None:
        if self._pending:
            self.wait(numbers)


def exchange_in_stage_0(engine: Any, exchange: GradientExchange) -> None:
    """Makes DeepSpeed's step of stage 0 begin with the mean gradients of the exchange."""
    step = engine.optimizer.step

    def step_on_means(*args: Any, **kwargs: Any) -> Any:
        exchange.hand_over()
        return step(*args, **kwargs)

    engine.optimizer.step = step_on_means


def exchange_in_shards(
    engine: Any, exchange: GradientExchange, gather: WeightGather, ranks: Ranks, clip_norm: float
) -> None:
    """Replaces DeepSpeed's step of stages 1 and 2: norm, clipping, Adam on this rank's shares, and the gather begun.

    A gradient that is not finite changes only fp16's loss scale: the device itself skips the update (`found_inf` of torch's
    fused Adam), so that the host learns of it after everything has been queued. The scale grows after the update, which
    is still unscaled by the old one.
    """
    optimizer = engine.optimizer
    masters = optimizer.single_partition_of_fp32_groups
    is_fixed_point = any(bucket.is_fixed_point for bucket in exchange.buckets)
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    optimizer.finalize_gradient_accumulation_boundary = lambda: None

    @torch.no_grad()
    def step(*_: Any, **__: Any) -> None:
        means = exchange.means()
        squares = sums_of_squares(means) if is_fixed_point else torch.nn.utils.get_total_norm(means).double().square()
        scaled_norm = ranks.total_on_device(squares).sum().sqrt()
        fetched, scale = Fetched(scaled_norm, ranks), optimizer.loss_scale
        if clip_norm or scale != 1.0:
            clip = (clip_norm / (scaled_norm / scale + 1e-6)).clamp(max=1.0) if clip_norm else scaled_norm.new_ones(())
            torch._foreach_mul_(means, (clip / scale).float())
        for master, mean in zip(masters, means, strict=True):
            master.grad = mean
        is_skipped = (~torch.isfinite(scaled_norm)).float()
        _update_matrices(optimizer.optimizer, exchange.buckets, ranks, is_skipped)
        _update(optimizer.optimizer, is_skipped)
        for master in masters:
            master.grad = None
        mine = [parts[ranks.rank] for parts in optimizer.parallel_partitioned_bit16_groups]
        # Before torch 2.11 CUDA takes the first one's type for all.
        for dtype in sorted({part.dtype for part in mine}, key=str):
            alike = [(part, master) for part, master in zip(mine, masters, strict=True) if part.dtype == dtype]
            torch._foreach_copy_([part for part, _ in alike], [master for _, master in alike])
        gather.start(optimizer.bit16_groups_flat, mine)
        exchange.release()
        norm = fetched.value()
        optimizer.overflow = not math.isfinite(norm)
        optimizer._global_grad_norm = norm / scale
        optimizer._update_scale(optimizer.overflow)

    optimizer.step = step


def _update_matrices(adam: Any, buckets: Sequence[Bucket], ranks: Ranks, is_skipped: Tensor) -> None:
    """Updates this rank's shares of the matrices of Muon, all of whose momentum it gathers (collective)."""
    on_the_way = []
    for bucket, group in zip(buckets, adam.param_groups, strict=True):
        if "rows" in group:
            (master,) = group["params"]
            momentum = adam.state[master]["exp_avg"]
            before = momentum.clone()
            mine = moved(momentum, master.grad)
            momentum.copy_(torch.where(is_skipped.bool(), before, momentum))
            whole = mine if ranks.num_ranks == 1 else mine.new_empty(mine.numel() * ranks.num_ranks)
            on_the_way.append((bucket, group, master, ranks.start_gather(whole, mine)))
    held, shares = [], []  # the matrices of which this rank has a part, and its part of all
    for bucket, group, master, pending in on_the_way:
        whole, size, place = pending.wait(), master.numel(), 0
        shares.append(whole[ranks.rank * size : (ranks.rank + 1) * size])
        for packed, rows in zip(bucket.views_of(whole), group["rows"], strict=True):
            for matrix in torch.split(packed, [*rows]):
                if place < (ranks.rank + 1) * size and ranks.rank * size < place + matrix.numel():
                    held.append(matrix)
                place += matrix.numel()
    orthogonalize(held)
    for change, (_, group, master, _) in zip(shares, on_the_way, strict=True):
        rate = group["lr"] * (1.0 - is_skipped)
        master.mul_(1.0 - rate * group["weight_decay"]).sub_(torch.nan_to_num(change) * rate)


def _update(adam: Any, is_skipped: Tensor) -> None:
    """Updates all buckets with one call for those of the same settings; 1.0 in `is_skipped`: none, as the device decides."""
    if not adam.defaults["fused"]:
        if not is_skipped:  # only the fused kernel leaves that to the device
            adam.step()
        return
    groups = adam.param_groups
    merged: dict[float, dict[str, Any]] = {}
    for group in [group for group in groups if "rows" not in group]:
        merged.setdefault(group["weight_decay"], {**group, "params": []})["params"].extend(group["params"])
    adam.param_groups, adam.found_inf = list(merged.values()), is_skipped
    try:
        adam.step()
    finally:
        adam.param_groups = groups
