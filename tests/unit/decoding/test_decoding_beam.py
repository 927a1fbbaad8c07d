"""Beam search against enumeration of every translation, greedy search, and itself."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding import beam
from dist_transformer.decoding.beam import length_penalty, likeliest
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.model.search_interface import Hypothesis, SearchInput
from dist_transformer.model.transformer import DecodingCache, Transformer

PAD, BOS, EOS = 0, 1, 2
MakeModel = Callable[..., Transformer]
ODD_SIZES: dict[str, Any] = {"num_heads": 3, "key_size": 5, "value_size": 7}
LEARNED: dict[str, Any] = {"positions": "learned", "max_positions": 9}


def search(model: Transformer, source: Tensor, **settings: float) -> list[list[Hypothesis]]:
    """All that the beam finds, unless n_best is given."""
    config = DecodingConfig(**{"n_best": settings["beam_size"], **settings})
    searcher = TorchSearcher([model], SpecialTokens(BOS, EOS, PAD), config, torch.device("cpu"))
    return searcher.search([SearchInput(row[row != PAD].tolist(), [], number) for number, row in enumerate(source)])


def ragged_sources(vocabulary: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(3, vocabulary, (count, 8), generator=generator)
    for row, length in enumerate(torch.randint(1, 9, (count,), generator=generator).tolist()):
        source[row, length - 1] = EOS
        source[row, length:] = PAD
    return source


@torch.no_grad()
def log_probability(model: Transformer, source: Tensor, tokens: list[int]) -> float:
    """Of the tokens and the eos after them, by one uncached pass."""
    logits = model(source[None], torch.tensor([[BOS, *tokens]]))[0]
    return float(logits.float().log_softmax(-1)[range(len(tokens) + 1), [*tokens, EOS]].sum())


@pytest.mark.parametrize("beam_size", [8, 15])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_a_wide_beam_finds_what_enumerating_all_translations_finds(
    beam_size: int, alpha: float, make_random_model: MakeModel
) -> None:
    """Two words and at most 3 of them before eos: 15 translations, of which 8 can live at once."""
    model, source = make_random_model(5), torch.tensor([[3, 4, EOS], [4, 4, EOS]])
    together = search(model, source, beam_size=beam_size, length_penalty=alpha, max_extra_tokens=1)
    for row, found in zip(source, together, strict=True):
        scored = []
        for length in range(4):
            for tokens in itertools.product([3, 4], repeat=length):
                total = log_probability(model, row, list(tokens))
                scored.append((total / ((5 + length + 1) / 6) ** alpha, total, list(tokens)))
        expected = sorted(scored, reverse=True)[:beam_size]
        assert [hypothesis.tokens for hypothesis in found] == [tokens for _, _, tokens in expected]
        assert [h.score for h in found] == pytest.approx([score for score, _, _ in expected], rel=1e-5)
        assert [h.log_probability for h in found] == pytest.approx([total for _, total, _ in expected], rel=1e-5)


@torch.no_grad()
def greedy(model: Transformer, source: Tensor, longest: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) + 1 < longest:
        logits = model(source[None], torch.tensor([[BOS, *tokens]]))[0, -1]
        logits[[PAD, BOS]] = -torch.inf
        if (token := int(logits.argmax())) == EOS:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("given", [{}, ODD_SIZES, LEARNED], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_a_beam_of_1_is_greedy_search(alpha: float, given: dict[str, Any], make_random_model: MakeModel) -> None:
    model, source = make_random_model(9, seed=4, **given), ragged_sources(9, 12)
    found = search(model, source, beam_size=1, length_penalty=alpha, max_extra_tokens=4)
    longest = model.max_positions or 12
    expected = [greedy(model, row, min(longest, int((row != PAD).sum()) + 4)) for row in source]
    assert [hypotheses[0].tokens for hypotheses in found] == expected
    assert len({len(tokens) for tokens in expected}) > 2


def test_no_translation_is_longer_than_the_learned_positions(make_random_model: MakeModel) -> None:
    model, source = make_random_model(9, **LEARNED), ragged_sources(9, 12)
    lengths = {len(h.tokens) + 1 for found in search(model, source, beam_size=3, max_extra_tokens=50) for h in found}
    assert max(lengths) == LEARNED["max_positions"]


def test_scores_are_those_of_the_uncached_model(make_random_model: MakeModel) -> None:
    model, source = make_random_model(9), ragged_sources(9, 6)
    for row, hypotheses in zip(source, search(model, source, beam_size=3, length_penalty=0.6), strict=True):
        for found in hypotheses:
            total = log_probability(model, row, found.tokens)
            assert found.log_probability == pytest.approx(total, rel=1e-4)
            assert found.score == pytest.approx(total / ((5 + len(found.tokens) + 1) / 6) ** 0.6, rel=1e-4)
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_neither_the_rest_of_the_batch_nor_padding_changes_a_translation(
    beam_size: int, make_random_model: MakeModel
) -> None:
    model, source = make_random_model(9), ragged_sources(9, 10)
    together = search(model, source, beam_size=beam_size)
    for row, expected in zip(source, together, strict=True):
        (alone,) = search(model, row[row != PAD][None], beam_size=beam_size)
        assert [h.tokens for h in alone] == [h.tokens for h in expected]
        assert [h.score for h in alone] == pytest.approx([h.score for h in expected], rel=1e-5)


@pytest.fixture
def watch_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[Transformer], list[int]]:
    """The list that the number of rows of every decoding step is written to."""

    def watch(model: Transformer) -> list[int]:
        num_rows: list[int] = []
        step = model.decode_step

        def counted_step(token_B: Tensor, cache: DecodingCache) -> Tensor:
            num_rows.append(len(token_B))
            return step(token_B, cache)

        monkeypatch.setattr(model, "decode_step", counted_step)
        return num_rows

    return watch


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_stopping_early_loses_no_better_translation(
    alpha: float,
    make_random_model: MakeModel,
    watch_rows: Callable[[Transformer], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, source = make_random_model(7, seed=7), ragged_sources(7, 8)
    with torch.no_grad():
        model.output_weight.mul_(0.3)  # so that eos is never unlikely and translations end before they must
    num_rows = watch_rows(model)
    early = search(model, source, beam_size=3, length_penalty=alpha, max_extra_tokens=30)
    rows_of_early = sum(num_rows)
    monkeypatch.setattr(beam.BeamSearch, "_is_done", lambda self: self.longest_N == self.length)
    late = search(model, source, beam_size=3, length_penalty=alpha, max_extra_tokens=30)
    assert [[h.tokens for h in hypotheses] for hypotheses in early] == [[h.tokens for h in row] for row in late]
    assert rows_of_early < sum(num_rows) - rows_of_early


@pytest.mark.parametrize("n_best", [1, 2])
def test_fewer_translations_asked_for_are_the_best_of_all_and_cost_fewer_steps(
    n_best: int, make_random_model: MakeModel, watch_rows: Callable[[Transformer], list[int]]
) -> None:
    model, source = make_random_model(7, seed=7), ragged_sources(7, 8)
    with torch.no_grad():
        model.output_weight.mul_(0.3)
    num_rows = watch_rows(model)
    expected = [hypotheses[:n_best] for hypotheses in search(model, source, beam_size=4, max_extra_tokens=30)]
    rows_of_all = sum(num_rows)
    found = search(model, source, beam_size=4, max_extra_tokens=30, n_best=n_best)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]
    assert sum(num_rows) - rows_of_all < rows_of_all


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("vocabulary", [8, 128 * 9, 128 * 9 + 5, 128 * 20 + 127])
def test_the_likeliest_tokens_are_those_of_sorting_all(vocabulary: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary + count)
    logits = torch.randn(5, vocabulary, generator=generator)
    logits[1] = torch.arange(vocabulary).float()  # the likeliest at the end, side by side
    logits[2] = -logits[1]
    logits[3, vocabulary // 2 :] = -torch.inf
    values, places = likeliest(logits, count)
    assert torch.equal(values, logits.sort(dim=1, descending=True).values[:, :count])
    assert torch.equal(values, logits.gather(1, places))
    assert all(len(set(row.tolist())) == count for row in places)


def test_finished_sentences_leave_the_batch(
    make_random_model: MakeModel, watch_rows: Callable[[Transformer], list[int]]
) -> None:
    model, source = make_random_model(9), ragged_sources(9, 8)
    num_rows = watch_rows(model)
    search(model, source, beam_size=2)
    assert num_rows == sorted(num_rows, reverse=True)
    assert num_rows[0] == 16
    assert num_rows[-1] < 16


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_longest_output_is_the_source_and_the_extra_tokens_with_eos(
    beam_size: int, make_unigram_model: MakeModel
) -> None:
    model = make_unigram_model([0.0, 0.0, -40.0, 1.0, 2.0])
    source = torch.tensor([[3, 4, 3, EOS], [4, EOS, PAD, PAD]])
    found = search(model, source, beam_size=beam_size, max_extra_tokens=5)
    assert [{len(h.tokens) for h in hypotheses} for hypotheses in found] == [{4 + 5 - 1}, {2 + 5 - 1}]


@pytest.mark.parametrize("beam_size", [1, 4])
def test_padding_and_bos_are_never_generated_however_likely(beam_size: int, make_unigram_model: MakeModel) -> None:
    model = make_unigram_model([30.0, 30.0, 0.0, 0.5, 0.0])
    (found,) = search(model, torch.tensor([[3, 4, EOS]]), beam_size=beam_size, max_extra_tokens=2)
    assert all(token in (3, 4) for hypothesis in found for token in hypothesis.tokens)
    assert all(hypothesis.score > float("-inf") for hypothesis in found)


def test_an_output_of_no_tokens_is_possible(make_unigram_model: MakeModel) -> None:
    model = make_unigram_model([0.0, 0.0, 9.0, 0.0, 0.0])
    (found,) = search(model, torch.tensor([[3, EOS]]), beam_size=2)
    assert found[0].tokens == []


def test_the_length_penalty_is_that_of_wu_et_al() -> None:
    for length, alpha in ((1, 0.6), (7, 0.6), (50, 1.0), (9, 0.0)):
        assert length_penalty(length, alpha) == pytest.approx((5 + length) ** alpha / 6**alpha)


def test_a_greater_length_penalty_gives_no_shorter_translations(make_random_model: MakeModel) -> None:
    model, source = make_random_model(7), ragged_sources(7, 8)
    num_tokens = [
        sum(len(hypotheses[0].tokens) for hypotheses in search(model, source, beam_size=4, length_penalty=alpha))
        for alpha in (0.0, 0.6, 1.5)
    ]
    assert num_tokens == sorted(num_tokens)
    assert num_tokens[0] < num_tokens[-1]


def test_a_model_in_training_mode_is_our_mistake(make_random_model: MakeModel) -> None:
    with pytest.raises(AssertionError, match="eval"):
        search(make_random_model(7).train(), torch.tensor([[3, EOS]]), beam_size=1)
