"""The model without padding, a lever of the GPU benchmark, computes what the model does: a gain must not be another loss."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.transformer import Transformer

PAD_ID, BOS_ID, VOCABULARY = 0, 1, 50
LENGTHS = ((3, 7), (6, 2), (1, 1), (6, 5))
"""Of source and target of each row; in no order."""


@pytest.fixture
def without_padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's module; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import without_padding

    yield without_padding
    del sys.modules["without_padding"]


def padded(lengths: list[int]) -> torch.Tensor:
    rows = [torch.randint(2, VOCABULARY, (length,)) for length in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_loss_and_gradients_without_padding_are_the_models(without_padding: Any, norm: str) -> None:
    torch.manual_seed(1)
    config = ModelConfig(preset="tiny", dropout=0.0, norm=norm)
    model = Transformer(config, VOCABULARY, VOCABULARY, PAD_ID).double()
    other = without_padding.WithoutPadding(config, VOCABULARY, VOCABULARY, PAD_ID).double()
    other.load_state_dict(model.state_dict())
    source_BS, target_BT = (padded(list(side)) for side in zip(*LENGTHS, strict=True))
    target_in_BT = torch.cat([torch.full((len(LENGTHS), 1), BOS_ID), target_BT[:, :-1]], 1)
    for network in (model, other):
        loss, nll = network.loss(source_BS, target_in_BT, target_BT, 0.1)
        loss.backward()
        network.sums = (loss.item(), nll.item())
    assert other.sums == pytest.approx(model.sums, rel=1e-12)
    for (name, expected), found in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9, msg=name)
