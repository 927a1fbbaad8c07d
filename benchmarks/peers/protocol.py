"""What a trainer of the race is given, and what the race must hear from it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import Corpus

LABEL_SMOOTHING = 0.1
DROPOUT = 0.1
BETAS = (0.9, 0.98)
EPSILON = 1e-9
PEAK_LEARNING_RATE = 5e-4
WARMUP_STEPS = 200
"""Linear growth: the same learning rate for all in the steps that are compared, whatever each calls its schedule."""
SEED = 1
NEVER = 100_000
"""Step at which the trainers are told to end, save and validate: the race ends them long before."""
MARK = "MARK "
"""How a line begins that a script of this folder prints for the race."""


@dataclass(frozen=True)
class Task:
    """One run of one trainer.

    Attributes:
        folder: of this run, empty; everything the trainer writes goes there.
        sizes: of the model, as in a preset of the package: d_model, d_ff, num_heads, num_encoder_layers, ...
        tokens: real target tokens a step that each trainer is set up to come close to.
        last_step: the run is over after it: the trainer is killed.
    """

    folder: Path
    corpus: Corpus
    sizes: Mapping[str, Any]
    tokens: int
    last_step: int
    steps_per_mark: int
    threads: int

    @property
    def layers(self) -> int:
        return int(self.sizes["num_encoder_layers"])


@dataclass(frozen=True)
class Mark:
    """What a line of a trainer's output says of the steps since the line before: the label-smoothed loss per target token
    of these steps (or of their last one), and their real target tokens, ends of sentences included."""

    step: int
    target_tokens: float
    loss: float


@dataclass(frozen=True)
class Peer:
    """A trainer.

    Attributes:
        packages: arguments of `pip install`, one call each; none: it runs in this environment.
        modules: what must be importable in this environment, for one that runs in it.
        start: the command, after writing what it reads into the folder of the task. The path is the environment's python.
        mark: what a line of its output says; None: nothing.
        differs: how its work differs from ours where it cannot be told to do the same.
    """

    name: str
    packages: Sequence[Sequence[str]]
    modules: Sequence[str]
    start: Callable[[Task, Path], list[str]]
    mark: Callable[[str, Task], Mark | None]
    differs: str


def printed_mark(line: str, task: Task) -> Mark | None:
    """The mark of a script of this folder."""
    return Mark(**json.loads(line[len(MARK) :])) if line.startswith(MARK) else None
