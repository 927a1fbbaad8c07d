"""Sampling: which tokens can be drawn, how often, and what the draw depends on."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding.sampling import choose, draws
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.model.search_interface import Hypothesis, SearchInput
from dist_transformer.model.transformer import Transformer

PAD, BOS, EOS = 0, 1, 2
MakeModel = Callable[..., Transformer]
LOGITS = torch.tensor([1.5, -1.0, 0.3, -torch.inf, 2.0, 0.29])
GRID = 4000


def search(model: Transformer, numbers: list[int], **settings: Any) -> list[list[Hypothesis]]:
    config = DecodingConfig(sampling=True, **settings)
    searcher = TorchSearcher([model], SpecialTokens(BOS, EOS, PAD), config, torch.device("cpu"))
    return searcher.search([SearchInput([3, 4, EOS], [], number) for number in numbers])


def shares(**settings: Any) -> list[float]:
    """What part of the numbers between 0 and 1 chooses each token of LOGITS."""
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    chosen = choose(LOGITS.expand(GRID, -1), grid, DecodingConfig(sampling=True, **settings))
    counts = Counter(chosen.tolist())
    return [counts[token] / GRID for token in range(len(LOGITS))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_each_token_is_drawn_as_often_as_it_is_likely(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0).tolist()
    assert shares(temperature=temperature) == pytest.approx(expected, abs=2 / GRID)


def test_a_temperature_near_zero_draws_the_likeliest() -> None:
    assert shares(temperature=1e-40) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("top_k", "kept"), [(1, [4]), (2, [0, 4]), (3, [0, 2, 4]), (100, [0, 1, 2, 4, 5])])
def test_top_k_draws_from_the_likeliest_in_their_proportions(top_k: int, kept: list[int]) -> None:
    probability = torch.zeros(len(LOGITS)).index_put((torch.tensor(kept),), LOGITS.exp()[kept])
    assert shares(top_k=top_k) == pytest.approx((probability / probability.sum()).tolist(), abs=2 / GRID)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_draws_from_the_fewest_tokens_that_have_the_probability(top_p: float, top_k: int) -> None:
    probability = LOGITS.softmax(0).tolist()
    kept, total = [], 0.0
    for token in sorted(range(len(LOGITS)), key=lambda token: -probability[token])[: top_k or None]:
        if total >= top_p:
            break
        kept.append(token)
        total += probability[token]
    expected = [probability[token] / total if token in kept else 0.0 for token in range(len(LOGITS))]
    assert shares(top_p=top_p, top_k=top_k) == pytest.approx(expected, abs=2 / GRID)


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_no_number_chooses_an_impossible_token(settings: dict[str, Any]) -> None:
    logits = torch.full((3, 50), -torch.inf)
    logits[:, [7, 9]] = torch.tensor([0.1, 0.3])
    extreme = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    assert set(choose(logits, extreme, DecodingConfig(sampling=True, **settings)).tolist()) <= {7, 9}


def test_a_draw_depends_on_seed_line_sample_and_position_alone() -> None:
    assert draws(1, 5, 0, 40)[:7] == draws(1, 5, 0, 7)
    others = [draws(*key, 7) for key in [(1, 5, 0), (2, 5, 0), (1, 6, 0), (1, 5, 1), (5, 1, 0)]]
    assert len({number for drawn in others for number in drawn}) == 7 * len(others)
    assert all(0 <= number < 1 for drawn in others for number in drawn)


def test_translations_are_as_often_as_they_are_likely(make_unigram_model: MakeModel) -> None:
    """Tokens that depend on nothing: each translation's share is the product of its tokens' probabilities."""
    model = make_unigram_model([-30.0, -30.0, 1.0, 0.5, 0.0])
    found = search(model, list(range(500)), n_best=4, max_extra_tokens=40)
    counts = Counter(tuple(hypothesis.tokens) for hypotheses in found for hypothesis in hypotheses)
    total = sum(counts.values())
    assert total == 2000
    probability = torch.tensor([-30.0, -30.0, 1.0, 0.5, 0.0]).softmax(0)
    for tokens in [(), (3,), (4,), (3, 3), (4, 3), (3, 4, 3)]:
        expected = float(probability[[*tokens, EOS]].prod())
        deviation = math.sqrt(expected * (1 - expected) / total)
        assert abs(counts[tokens] / total - expected) < 4 * deviation, tokens


def test_the_seed_and_the_line_change_the_translation_and_nothing_else_does(make_random_model: MakeModel) -> None:
    model = make_random_model(9)
    one, again, other_seed = (
        [hypotheses[0].tokens for hypotheses in search(model, numbers, seed=seed)]
        for numbers, seed in [([0, 1, 2, 3], 1), ([3, 2, 1, 0], 1), ([0, 1, 2, 3], 2)]
    )
    assert one == again[::-1]
    assert len({tuple(tokens) for tokens in one}) > 1
    assert one != other_seed


def test_samples_are_given_the_likeliest_first_with_the_models_own_scores(make_random_model: MakeModel) -> None:
    (found,) = search(make_random_model(9), [0], n_best=6, temperature=2.0, length_penalty=0.6, max_extra_tokens=5)
    assert len(found) == 6
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    for hypothesis in found:
        length = len(hypothesis.tokens) + 1
        assert hypothesis.score == pytest.approx(hypothesis.log_probability / ((5 + length) / 6) ** 0.6)
    assert len({tuple(h.tokens) for h in found}) > 1


def test_drawing_from_the_one_likeliest_token_is_greedy_search(make_random_model: MakeModel) -> None:
    model = make_random_model(9)
    sampled = search(model, [0, 1, 2], top_k=1)
    greedy = DecodingConfig(beam_size=1)
    searcher = TorchSearcher([model], SpecialTokens(BOS, EOS, PAD), greedy, torch.device("cpu"))
    (expected,) = searcher.search([SearchInput([3, 4, EOS], [], 0)])
    assert [hypotheses[0].tokens for hypotheses in sampled] == [expected[0].tokens] * 3
    assert sampled[0][0].score == pytest.approx(expected[0].score)
