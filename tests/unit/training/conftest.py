"""One process that is a group of its own: real DeepSpeed engines without a launcher."""

from collections.abc import Callable, Iterator

import pytest
import torch
from plain_torch import TINY, VOCABULARY

from dist_transformer import distributed
from dist_transformer.config.models import OptimizerConfig, TrainingConfig
from dist_transformer.distributed import Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.training.engine import Engine
from dist_transformer.training.objective import Objective


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    yield distributed.join(60)
    distributed.leave()


@pytest.fixture
def make_engine(ranks: Ranks) -> Callable[..., Engine]:
    """An engine over the same tiny model each time; settings by keyword."""

    def make(optimizer: OptimizerConfig | None = None, seed: int = 0, **training: object) -> Engine:
        torch.manual_seed(seed)
        model = Transformer(TINY, VOCABULARY, VOCABULARY, 0)
        settings = TrainingConfig(**{"precision": "fp32", "zero_stage": 1, **training})
        objective = Objective(model, settings.label_smoothing, settings.precision)
        return Engine(objective, settings, optimizer or OptimizerConfig(), ranks)

    return make


@pytest.fixture(scope="session")
def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ragged micro-batches (source, target in, target out) with padding at the end."""
    random = torch.Generator().manual_seed(1)
    made = []
    for index in range(8):
        source = torch.randint(4, VOCABULARY, (4, 5 + index % 3), generator=random)
        target = torch.randint(4, VOCABULARY, (4, 7), generator=random)
        lengths = torch.randint(2, 8, (4, 1), generator=random)
        target = torch.where(torch.arange(7)[None] < lengths, target, 0)
        made.append((source, torch.cat([torch.ones(4, 1, dtype=torch.long), target[:, :-1]], 1), target))
    return made
