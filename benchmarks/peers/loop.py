"""The common part of the two loops: ids, batches of like lengths, Adam, the learning rate, marks."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2, 3
NUM_SPECIAL = 4
POOL_PAIRS = 20_000
"""Sorted by length together, as most trainers do."""
FILL = 0.985
"""Share of real tokens in a padded target side that comes out of such pools."""
Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(source, target in, target out), each (batch, length), to the sum of the label-smoothed loss over target tokens."""


def read_task() -> dict[str, Any]:
    """The task in the file that the command line names."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    task["vocabulary"] = (len(task["pieces"]) + NUM_SPECIAL + 7) // 8 * 8
    return task


def train(task: dict[str, Any], model: nn.Module, loss_sum: Step) -> None:
    """Trains, and prints what the race wants to know."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=task["betas"], eps=task["epsilon"])
    model.train()
    tokens = total = 0.0
    for step, batch in zip(range(1, task["max_steps"] + 1), batches(task), strict=False):
        peak, warmup = task["learning_rate"], task["warmup_steps"]
        optimizer.param_groups[0]["lr"] = peak * min(step / warmup, (warmup / step) ** 0.5)
        target_tokens = int((batch[2] != PAD_ID).sum())
        loss = loss_sum(*batch)
        (loss / target_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens, total = tokens + target_tokens, total + loss.item()
        if step % task["steps_per_mark"] == 0:
            print("MARK " + json.dumps({"step": step, "target_tokens": tokens, "loss": total / tokens}), flush=True)
            tokens = total = 0.0


def batches(task: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Shuffled batches of pairs of like lengths, for ever."""
    numbers = {piece: number + NUM_SPECIAL for number, piece in enumerate(task["pieces"])}
    source, target = (
        [[numbers.get(piece, UNKNOWN_ID) for piece in line.split()] + [EOS_ID] for line in _lines(path)]
        for path in task["cut"]
    )
    pairs, order = list(zip(source, target, strict=True)), random.Random(task["seed"])
    while True:
        order.shuffle(pairs)
        for first in range(0, len(pairs), POOL_PAIRS):
            pool = sorted(pairs[first : first + POOL_PAIRS], key=lambda pair: (len(pair[1]), len(pair[0])))
            groups = list(_grouped(pool, task["tokens"] / FILL))
            order.shuffle(groups)
            yield from map(_tensors, groups)


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").split("\n")[:-1]


def _grouped(pool: list[Any], budget: float) -> Iterator[list[Any]]:
    group: list[Any] = []
    for pair in pool:
        if group and (len(group) + 1) * len(pair[1]) > budget:
            yield group
            group = []
        group.append(pair)
    yield group


def _tensors(group: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    source, target = ([torch.tensor(ids) for ids in side] for side in zip(*group, strict=True))
    out = nn.utils.rnn.pad_sequence(target, batch_first=True, padding_value=PAD_ID)
    begin = torch.full((len(group), 1), BOS_ID)
    return nn.utils.rnn.pad_sequence(source, True, PAD_ID), torch.cat([begin, out[:, :-1]], 1), out
