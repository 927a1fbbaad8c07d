"""One process that is a group of its own: real DeepSpeed engines without a launcher."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from plain_torch import TINY, VOCABULARY, MicroBatch, ragged_batches

from dist_transformer.config.schema import OptimizerConfig, TrainingConfig
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine import engine
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective

FP16_CONSTANTS = ("INITIAL_LOSS_SCALE", "LOSS_SCALE_WINDOW")


@pytest.fixture
def make_engine(ranks: Ranks) -> Iterator[Callable[..., Engine]]:
    """An engine over the same tiny model each time; settings of `training` by keyword, and constants of fp16."""
    made: list[Engine] = []

    def make(
        optimizer: OptimizerConfig | None = None, seed: int = 0, dropout: float = 0.0, **training: object
    ) -> Engine:
        torch.manual_seed(seed)
        constants = {name: training.pop(name.lower()) for name in FP16_CONSTANTS if name.lower() in training}
        settings = TrainingConfig(**{"precision": "fp32", "zero_stage": 1, **training})
        model = Transformer(
            TINY.model_copy(update={"dropout": dropout}),
            VOCABULARY,
            VOCABULARY,
            0,
            activation_checkpointing=settings.activation_checkpointing,
        )
        objective = Objective(model, settings.label_smoothing, settings.precision)
        with patch.multiple(engine, **constants) if constants else nullcontext():
            made.append(Engine(objective, settings, optimizer or OptimizerConfig(), ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def batches() -> list[MicroBatch]:
    """Ragged micro-batches (source, target in, target out) with padding at the end."""
    return ragged_batches(8)
