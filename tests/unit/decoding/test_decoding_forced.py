"""Forced scores against torch's cross-entropy, and against themselves in other batches."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from dist_transformer.decoding import scoring
from dist_transformer.decoding.scoring import forced_log_probabilities
from dist_transformer.model.transformer import Transformer

PAD, BOS, EOS = 0, 1, 2
MakeModel = Callable[..., Transformer]
SOURCE = torch.tensor([[3, 4, 5, EOS], [6, EOS, PAD, PAD], [4, 4, EOS, PAD]])
TARGET_IN = torch.tensor([[BOS, 4, 5, PAD], [BOS, 8, 7, 6], [BOS, PAD, PAD, PAD]])
TARGET_OUT = torch.tensor([[4, 5, EOS, PAD], [8, 7, 6, EOS], [EOS, PAD, PAD, PAD]])


@torch.no_grad()
def test_scores_are_the_negative_of_the_cross_entropy_and_0_at_padding(make_random_model: MakeModel) -> None:
    model = make_random_model(9)
    logits = model(SOURCE, TARGET_IN).transpose(1, 2)
    expected = -F.cross_entropy(logits, TARGET_OUT, ignore_index=PAD, reduction="none")
    found = forced_log_probabilities([model], SOURCE, TARGET_IN, TARGET_OUT)
    torch.testing.assert_close(found, expected.float())
    assert found.dtype == torch.float32
    assert torch.equal(found == 0, TARGET_OUT == PAD)


@torch.no_grad()
def test_an_ensemble_scores_by_the_mean_probability(make_random_model: MakeModel) -> None:
    models = [make_random_model(9, seed=seed) for seed in (1, 2, 3)]
    found = forced_log_probabilities(models, SOURCE, TARGET_IN, TARGET_OUT)
    probability = sum(model(SOURCE, TARGET_IN).softmax(-1) for model in models) / 3
    expected = probability.gather(2, TARGET_OUT[..., None]).squeeze(2).log()
    torch.testing.assert_close(found, expected.masked_fill(TARGET_OUT == PAD, 0.0).float())


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_neither_chunks_nor_padding_nor_company_change_a_score(
    chunk: int, make_random_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_random_model(9)
    together = forced_log_probabilities([model], SOURCE, TARGET_IN, TARGET_OUT)
    alone = forced_log_probabilities([model], SOURCE[1:2, :2], TARGET_IN[1:2], TARGET_OUT[1:2])
    torch.testing.assert_close(alone, together[1:2])
    monkeypatch.setattr(scoring, "CHUNK_TOKENS", chunk)
    torch.testing.assert_close(forced_log_probabilities([model], SOURCE, TARGET_IN, TARGET_OUT), together)


def test_a_model_in_training_mode_is_our_mistake(make_random_model: MakeModel) -> None:
    with pytest.raises(AssertionError, match="eval"):
        forced_log_probabilities([make_random_model(9).train()], SOURCE, TARGET_IN, TARGET_OUT)
