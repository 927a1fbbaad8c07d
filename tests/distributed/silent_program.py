"""Flips single bits in what real gloo ranks hold at rest, a hundred times, and asks which rank is named; JSON of rank 0.

    silent_program.py RESULTS

Between two micro-batches, or between two steps, a rank drawn anew has one bit flipped in its weights, its moments or its
gradients, in ZeRO 0, 1 and 2. After each, the state is put back.
"""

import json
import os
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from plain_torch import TINY, VOCABULARY, ragged_batches, tokens_of  # noqa: E402
from running import Command  # noqa: E402

from dist_transformer.config.schema import OptimizerConfig, TrainingConfig  # noqa: E402
from dist_transformer.processes.launching import fork_local_ranks  # noqa: E402

FLIPS, RANKS = 100, 3
KINDS = ("weights", "moments", "gradients")
SETTINGS: list[dict[str, Any]] = [
    {"zero_stage": 0, "precision": "fp32"},
    {"zero_stage": 1, "precision": "fp32", "ema_decay": 0.9},
    {"zero_stage": 1, "precision": "bf16"},
    {"zero_stage": 2, "precision": "fp16"},
]


@dataclass(frozen=True)
class Flip:
    """`named`: ranks that the message names."""

    settings: dict[str, Any]
    kind: str
    rank: int
    bit: int
    named: list[int]


def launch(command: Command, folder: Path) -> list[Flip]:
    results = folder / "flips.json"
    code, said = command.program(Path(__file__), results)
    assert code == 0, f"silent_program.py ended with {code}\n{said}"
    return [Flip(**flip) for flip in json.loads(results.read_text(encoding="utf-8"))]


def run_as_rank(path: Path) -> None:
    from dist_transformer.distributed import group

    ranks, flips = group.join(120), []
    for number, settings in enumerate(SETTINGS):
        count = FLIPS // len(SETTINGS)
        flips += Flips(ranks, settings, path.parent, seed=number).run(count)
    if ranks.is_rank_zero:
        path.write_text(json.dumps(flips), encoding="utf-8")
    ranks.barrier()
    group.leave()
    os._exit(0)


class Flips:
    def __init__(self, ranks: Any, settings: dict[str, Any], folder: Path, seed: int) -> None:
        from dist_transformer.model.transformer import Transformer
        from dist_transformer.run.folder import RunDir
        from dist_transformer.training.engine import engine as engine_module
        from dist_transformer.training.engine.engine import Engine
        from dist_transformer.training.engine.objective import Objective
        from dist_transformer.training.silent_errors import begin_checks

        torch.manual_seed(0)
        engine_module.INITIAL_LOSS_SCALE = 1024  # no update is skipped
        self.ranks, self.settings, self.random = ranks, settings, random.Random(seed)
        training = TrainingConfig(audit_share=0.5, **settings)
        objective = Objective(Transformer(TINY, VOCABULARY, VOCABULARY, 0), 0.1, training.precision)
        self.engine = Engine(objective, training, OptimizerConfig(), ranks)
        config = SimpleNamespace(training=training, run=SimpleNamespace(seed=1))
        run: Any = SimpleNamespace(config=config, ranks=ranks, run_dir=RunDir(folder / f"run_{seed}"), stop=None)
        self.begin_checks = lambda: begin_checks(run, self.engine)
        self.batches = ragged_batches(4 * ranks.num_ranks)

    def run(self, count: int) -> list[dict[str, Any]]:
        self.step("nothing", 0)
        self.begin_checks().compare(1)
        state = [*self.engine._state(), *self.engine._parameters.values()]
        kept = [tensor.detach().clone() for tensor in state]
        found = []
        for _ in range(count):
            kind, rank, bit = self.random.choice(KINDS), self.random.randrange(RANKS), self.random.randrange(16)
            self.step(kind, rank, bit)
            found.append(dict(settings=self.settings, kind=kind, rank=rank, bit=bit, named=self.named()))
            self.engine._resting._changes.clear()
            self.engine.replicated()  # waits for the weights
            for tensor, values in zip(state, kept, strict=True):
                tensor.data.copy_(values)
            self.engine._resting.note("state", self.engine._state())
            for number in range(len(self.engine._flat_weights())):
                self.engine._weights_arrived(number)
        return found

    def named(self) -> list[int]:
        from dist_transformer.errors import MachineError

        try:
            self.begin_checks().compare(2)
        except MachineError as error:
            return [rank for rank in range(RANKS) if f"rank {rank} on" in str(error)]
        return []

    def step(self, kind: str, rank: int, bit: int = 0) -> None:
        """One step of four micro-batches on each rank; memory at rest is flipped before the third of them."""
        mine = self.batches[self.ranks.rank :: self.ranks.num_ranks]
        for number, micro_batch in enumerate(mine):
            if number == 2 and rank == self.ranks.rank and kind != "nothing":
                flip(self.at_rest(kind), self.random, bit)
            elif number == 2 and kind != "nothing":
                flip([], self.random, bit)
            loss, _ = self.engine(*micro_batch)
            self.engine.backward(loss, tokens_of(self.batches), is_last=number == len(mine) - 1)
        assert self.engine.step(1e-3)

    def at_rest(self, kind: str) -> list[torch.Tensor]:
        if kind == "weights":
            return [*self.engine._flat_weights(), *self.engine._masters()]
        return self.engine._gradients() if kind == "gradients" else self.engine._moments()


def flip(tensors: list[torch.Tensor], drawn: random.Random, bit: int) -> None:
    """Flips one bit of a word drawn from all of them; each rank draws as often, so that their generators stay alike."""
    share = drawn.random()
    if not tensors:
        return
    place = int(share * sum(tensor.numel() for tensor in tensors))
    for tensor in tensors:
        if place < tensor.numel():
            words = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16).view(-1)
            words[place] ^= -(2**15) if bit == 15 and words.dtype == torch.int16 else 1 << bit
            return
        place -= tensor.numel()


if __name__ == "__main__":
    sys.exit(fork_local_ranks(partial(run_as_rank, Path(sys.argv[1])), RANKS))
