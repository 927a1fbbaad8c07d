"""Engines and ranks without DeepSpeed and processes, for tests of what happens on the disk."""

import copy
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import async_writer
from dist_transformer.training.checkpoint.async_writer import AsyncWriter, PendingSave
from dist_transformer.training.engine.bit_sums import sums_by_part
from dist_transformer.training.engine.optimizer import PARTS
from dist_transformer.training.engine.sharded_state import Fragment

RUN_ID = "0123456789abcdef"
SHAPES = {"embedding": (7, 3), "norm.gain": (5,), "scale": ()}


class MemoryEngine:
    """A training state in plain tensors, of which each rank holds an equal part, as in ZeRO 3."""

    def __init__(
        self, seed: int, rank: int = 0, num_ranks: int = 1, parts: Sequence[str] = ("weight", "exp_avg")
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        random = torch.Generator().manual_seed(seed)
        self.tensors = {part: {n: torch.randn(s, generator=random) for n, s in SHAPES.items()} for part in parts}
        self.loaded_step: int | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(SHAPES)

    def fragments(self) -> list[Fragment]:
        found = []
        for part, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                size = -(-tensor.numel() // self.num_ranks)
                start = min(tensor.numel(), self.rank * size)
                found.append(Fragment(part, name, start, tensor.view(-1)[start : start + size]))
        return [fragment for fragment in found if fragment.values.numel()]

    def load(self, read: Callable[[str, str, int, int], Tensor | None], step: int) -> None:
        for part, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                values = read(part, name, 0, math.prod(SHAPES[name]))
                tensor.view(-1).copy_(torch.zeros(()) if values is None else values)
        self.loaded_step = step

    def bit_sums(self) -> dict[str, int]:
        return dict(zip(PARTS, sums_by_part(self.fragments()).tolist(), strict=True))

    def set_scaler_state(self, state: dict[str, Any]) -> None: ...


@dataclass
class _Meeting:
    """Where the threads of a group exchange values."""

    size: int
    barrier: threading.Barrier = field(init=False)
    values: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.values = threading.Barrier(self.size, timeout=20), [None] * self.size


class ThreadRanks:
    """One rank of a group whose ranks are threads of this process."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.num_ranks, self.is_rank_zero, self._meeting = rank, meeting.size, rank == 0, meeting

    def all_gather_object(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = copy.deepcopy(value)
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def from_rank_zero(self, make: Callable[[], Any]) -> Any:
        return self.all_gather_object(make() if self.is_rank_zero else None)[0]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self.all_gather_object(values)).sum(0))

    def start_sum(self, values: Tensor) -> SimpleNamespace:
        everyones = self.all_gather_object(values)
        return SimpleNamespace(wait=lambda: values.copy_(torch.stack(everyones).sum(0)))


def on_ranks(num_ranks: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` returns on each rank; raises the first rank's error."""
    meeting, results, errors = _Meeting(num_ranks), [None] * num_ranks, []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, meeting))
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    for error in errors:
        raise error
    return results


def state_of(step: int, **values: Any) -> dict[str, Any]:
    counts = {"batches": step, "skipped_updates": 0, "total_target_tokens": 0}
    return {"step": step, "run_id": RUN_ID, "validation": None, "position": {}, "recipe": {}, **counts, **values}


def save(run_dir: RunDir, step: int, num_ranks: int = 2, **state: Any) -> list[PendingSave]:
    """A checkpoint of the `MemoryEngine` with seed `step`, written by so many ranks; what each was told."""
    attempts = state.pop("save_attempts", 1)
    parts = state.pop("parts", ("weight", "exp_avg"))

    def work(ranks: ThreadRanks) -> PendingSave | None:
        run_dir.path.mkdir(exist_ok=True)
        saver = AsyncWriter(run_dir, ranks, lambda doing: None)
        saver.begin(MemoryEngine(step, ranks.rank, num_ranks, parts), state_of(step, **state))
        return saver.finish()

    with patch.object(async_writer, "SAVE_ATTEMPTS", attempts):
        return on_ranks(num_ranks, work)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folders(run_dir: RunDir) -> list[str]:
    """The names of all checkpoints, also of those that were set aside or are not ready."""
    return sorted(path.name for path in run_dir.checkpoints.glob("step_*"))


def rewrite(path: Path, **values: Any) -> None:
    """Changes values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")
