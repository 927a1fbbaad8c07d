"""Measurements of all ranks together. Every function is collective; times are medians of a few repeats."""

import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from dist_transformer.distributed.group import Ranks

LATENCY_REPEATS = 20
BANDWIDTH_REPEATS = 3
CLOCK_REPEATS = 9
BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Bytes sent at once: enough for the full speed of a network, and not more than a slow one moves in a second."""


def all_reduce(ranks: Ranks) -> dict[str, float]:
    """Latency of the smallest sum over all ranks, and bandwidth of a large one: 2 (n - 1) / n x bytes / time, which does
    not depend on the number of ranks n where the network is the limit.
    """
    small = torch.zeros(1, device=ranks.device)
    large = torch.zeros(BYTES[ranks.device.type] // 4, device=ranks.device)
    latency = _median_seconds(lambda: ranks.sum_on_device(small), LATENCY_REPEATS)
    seconds = _median_seconds(lambda: ranks.sum_on_device(large), BANDWIDTH_REPEATS)
    moved = 2 * (ranks.num_ranks - 1) / ranks.num_ranks * large.nbytes
    return {"all_reduce_latency_seconds": latency, "all_reduce_gb_per_second": moved / seconds / 1e9}


def exchange(ranks: Ranks, nodes: Sequence[Sequence[int]]) -> dict[str, float]:
    """The better of the bandwidths to the two neighbouring nodes, so that a good node next to a bad one is not blamed.

    Args:
        nodes: the ranks of each node. The i-th rank of a node exchanges with the i-th of its neighbours.
    """
    values = torch.zeros(BYTES[ranks.device.type] // 4, device=ranks.device)
    best = 0.0
    for pairs in ring_rounds(len(nodes)):
        ranks.barrier()
        for other in partners(ranks.rank, [(nodes[a], nodes[b]) for a, b in pairs]):
            seconds = _median_seconds(partial(ranks.exchange, other, values), BANDWIDTH_REPEATS)
            best = max(best, values.nbytes / seconds / 1e9)
    return {"exchange_gb_per_second": best} if best else {}


def ring_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Neighbours on a ring, in rounds in which each node has one partner: [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]."""
    if num_nodes < 3:
        return [[(0, 1)]] if num_nodes == 2 else []
    edges = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    if num_nodes % 2 == 0:
        return [edges[0::2], edges[1::2]]
    return [edges[0:-1:2], edges[1:-1:2], edges[-1:]]


def partners(rank: int, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Ranks with which `rank` exchanges in a round: one, or none if the nodes have different numbers of ranks."""
    both = [pair for left, right in pairs for pair in zip(left, right, strict=False)]
    return [b if rank == a else a for a, b in both if rank in (a, b)]


def clock(ranks: Ranks) -> dict[str, float]:
    """Seconds by which this rank's clock is ahead of rank 0's, read after a barrier: exact to the time of a collective."""
    found = []
    for _ in range(CLOCK_REPEATS):
        ranks.barrier()
        now = time.time()
        found.append(now - ranks.all_gather_object(now)[0])
    return {"clock_offset_seconds": median(found)}


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()  # the first call makes the connections
    return median(timeit.repeat(work, number=1, repeat=repeats))
