"""The second loss of guided alignment: what it aligns, and that cross-attention learns it in every way to train."""

import numpy as np
import pytest
import torch
from made_pairs import made_pairs
from plain_torch import TINY, VOCABULARY, MicroBatch, ragged_batches, tokens_of
from torch import nn

from dist_transformer.config.schema import OptimizerConfig, TrainingConfig
from dist_transformer.data.token_aligner import NULL_SHARE, Lexicon, train_aligner
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import JoinedShape, Transformer
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective
from dist_transformer.training.guided_alignment import GuidedAlignment

CONFIG = TINY.model_copy(update={"num_decoder_layers": 2})


def lexicon_of(batches: list[MicroBatch]) -> Lexicon:
    """Aligns the batches' own tokens, which are drawn at random."""
    rows = [
        (s[s != 0].numpy(), t[t != 0].numpy())
        for source, _, target in batches
        for s, t in zip(source, target, strict=True)
    ]
    return train_aligner(rows, VOCABULARY)


def guided(lexicon: Lexicon, weight: float = 1.0, activation_checkpointing: bool = False) -> Objective:
    torch.manual_seed(0)
    model = Transformer(CONFIG, VOCABULARY, VOCABULARY, 0, activation_checkpointing=activation_checkpointing)
    objective = Objective(model, 0.1, "fp32")
    objective.second_loss = GuidedAlignment(model, lexicon, weight).loss
    return objective


def test_of_made_pairs_nearly_all_tokens_are_aligned_as_they_were_made():
    """Alignment error rate of the likeliest source, with none where it is below a half; sure and possible links are one."""
    pairs = made_pairs(2000, seed=1)
    lexicon = train_aligner((pair for pair, _ in pairs), 200)
    guide = GuidedAlignment(Transformer(CONFIG, 200, 200, 0), lexicon, 1.0)
    found, true, both = 0, 0, 0
    for (source, target), truth in pairs[:300]:
        aligned_TS = guide.alignment(torch.tensor(source)[None], torch.tensor(target)[None])[0]
        assert torch.all(aligned_TS.sum(1) <= 1 + 1e-5)
        links = {(t, int(row.argmax())) for t, row in enumerate(aligned_TS) if row.max() > 0.5}
        sure = {(t, s) for t, s in enumerate(truth) if s >= 0}
        found, true, both = found + len(links), true + len(sure), both + len(links & sure)
    assert 1 - 2 * both / (found + true) < 0.05


def test_an_alignment_is_the_posterior_of_the_model():
    """One target token, 0.5 and 0.25 likely from two source tokens at the same distance from the diagonal."""
    lexicon = Lexicon(
        np.array([10 * VOCABULARY + 7, 11 * VOCABULARY + 7]),
        np.array([0.5, 0.25], np.float32),
        np.full(VOCABULARY, 0.1, np.float32),
    )
    guide = GuidedAlignment(Transformer(CONFIG, VOCABULARY, VOCABULARY, 0), lexicon, 1.0)
    aligned_BTS = guide.alignment(torch.tensor([[10, 11, 0]]), torch.tensor([[7]]))
    none, first, second = NULL_SHARE * 0.1, (1 - NULL_SHARE) * 0.25, (1 - NULL_SHARE) * 0.125
    expected = torch.tensor([[[first, second, 0.0]]]) / (none + first + second)
    torch.testing.assert_close(aligned_BTS, expected)


def test_a_batch_without_a_real_token_adds_no_loss_and_no_gradient(batches):
    """At the end of an epoch a lane may have none left: its rank computes such a one, and the step must not be lost."""
    objective = guided(lexicon_of(batches))
    loss, _ = objective(torch.tensor([[1]]), torch.tensor([[1]]), torch.tensor([[0]]), 0)
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in objective.parameters() if p.grad is not None)


def cross_entropies(
    ranks: Ranks, batches: list[MicroBatch], is_learned: bool, stage: int, checkpointing: bool
) -> list[float]:
    """The second loss per token in each step; not learned: it is computed, and has no part in the gradient."""
    objective, seen = guided(lexicon_of(batches[:2]), 1.0, checkpointing), []
    second_loss = objective.second_loss

    def watched(*tokens: object) -> torch.Tensor:
        loss = second_loss(*tokens)
        seen.append(float(loss.detach()))
        return loss if is_learned else 0 * loss

    objective.second_loss = watched
    engine = Engine(objective, TrainingConfig(precision="fp32", zero_stage=stage), OptimizerConfig(), ranks)
    tokens = tokens_of(batches[:2])
    for _ in range(12):
        for micro_batch in batches[:2]:
            loss, _ = engine(*micro_batch)
            engine.backward(loss, tokens)
        assert engine.step(1e-2)
    engine.close()
    return [(one + two) / tokens for one, two in zip(seen[::2], seen[1::2], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_cross_attention_learns_the_alignment_in_every_stage(ranks, batches, stage, checkpointing):
    learned = cross_entropies(ranks, batches, True, stage, checkpointing)
    without = cross_entropies(ranks, batches, False, 0, False)
    assert learned[0] == pytest.approx(without[0], rel=1e-5)
    assert learned[-1] < 0.9 * min(without)


def test_activation_checkpointing_which_computes_the_layer_again_holds_nothing_over_the_step(batches):
    objective = guided(lexicon_of(batches), activation_checkpointing=True)
    loss, _ = objective(*batches[0])
    loss.backward()
    assert objective.second_loss.__self__._seen is None


def test_batches_of_one_pass_have_the_loss_that_they_have_alone(batches):
    objective, plain = guided(lexicon_of(batches)), guided(lexicon_of(batches), weight=0.0)
    alone = sum(objective(*batch)[0] for batch in batches[:3])
    numbers = [(int((source != 0).sum()), int((target != 0).sum())) for source, _, target in batches[:3]]
    shapes = [JoinedShape(*s.shape, t.shape[1], *each) for (s, _, t), each in zip(batches[:3], numbers, strict=True)]
    together = [torch.cat([side.flatten() for side in sides]) for sides in zip(*batches[:3], strict=True)]
    joined, _ = objective(*together, shapes=shapes)
    torch.testing.assert_close(joined, alone, rtol=1e-5, atol=0)
    assert float(alone.detach()) > sum(float(plain(*batch)[0].detach()) for batch in batches[:3]) + 1


def test_padding_and_validation_have_no_part_in_it(batches):
    objective, (source, target_in, target) = guided(lexicon_of(batches)), ragged_batches(1)[0]
    loss, _ = objective(source, target_in, target)
    wider = [nn.functional.pad(side, (0, 3)) for side in (source, target_in, target)]
    torch.testing.assert_close(objective(*wider)[0], loss, rtol=1e-5, atol=0)
    with torch.no_grad():
        sums = objective(source, target_in, target)
    assert float(sums[0]) < float(loss.detach()) - 1
    assert torch.equal(objective(source, target_in, target, counts_hits=True)[0], sums[0])
