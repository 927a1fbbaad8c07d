"""One searcher for beam and sampling, one model or several: constraints against enumeration, ensembles against means."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding.scoring import forced_log_probabilities
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.errors import UserError
from dist_transformer.model.search_interface import Hypothesis, SearchInput
from dist_transformer.model.transformer import Transformer

PAD, BOS, EOS = 0, 1, 2
MakeModel = Callable[..., Transformer]
LINES = [[3, 4, 5, EOS], [6, EOS], [8, 7, 6, 5, 4, 3, EOS], [5, 5, EOS], [4, EOS]]


def searcher(models: Sequence[Transformer], **settings: Any) -> TorchSearcher:
    config = DecodingConfig(**{"max_extra_tokens": 4, **settings})
    return TorchSearcher(models, SpecialTokens(BOS, EOS, PAD), config, torch.device("cpu"))


@pytest.mark.parametrize(
    "settings", [{"beam_size": 1}, {"beam_size": 4, "n_best": 4}, {"sampling": True, "n_best": 4}], ids=str
)
def test_rows_of_the_model_beyond_the_last_piece_are_never_produced(make_unigram_model, settings):
    model = make_unigram_model([0.0, 0.0, 0.1, 0.3, 0.2, 0.1, 9.0, 9.0, 9.0])
    config = DecodingConfig(max_extra_tokens=4, **settings)

    def produced(**given: Any) -> set[int]:
        special = SpecialTokens(BOS, EOS, PAD, **given)
        found = TorchSearcher([model], special, config, torch.device("cpu")).search(inputs(LINES))
        return {token for hypotheses in found for hypothesis in hypotheses for token in hypothesis.tokens}

    assert produced() & {6, 7, 8}, "a row that no text trained is as likely as any"
    assert produced(num_pieces=6) <= {3, 4, 5}


def inputs(lines: Sequence[list[int]], prefixes: Sequence[list[int]] | None = None) -> list[SearchInput]:
    pairs = zip(lines, prefixes or [[]] * len(lines), strict=True)
    return [SearchInput(source, prefix, number) for number, (source, prefix) in enumerate(pairs)]


def tokens_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]


@torch.no_grad()
def probability(models: Sequence[Transformer], source: list[int], tokens: list[int]) -> float:
    """Of the tokens and the eos after them: the product of the models' mean probabilities, each from a pass of its own."""
    total = 1.0
    for place, token in enumerate([*tokens, EOS]):
        passes = [model(torch.tensor([source]), torch.tensor([[BOS, *tokens[:place]]]))[0, -1] for model in models]
        total *= sum(float(logits.double().softmax(0)[token]) for logits in passes) / len(models)
    return total


def enumerated(
    models: Sequence[Transformer], source: list[int], longest: int, allowed: Callable[[list[int]], bool]
) -> list[tuple[float, list[int]]]:
    """(score, tokens) of every translation of the words 3, 4 and 5 that is allowed, best first; length penalty 0.6."""
    scored = []
    for length in range(longest):
        for words in itertools.product([3, 4, 5], repeat=length):
            if allowed(list(words)):
                total = math.log(probability(models, source, list(words)))
                scored.append((total / ((5 + length + 1) / 6) ** 0.6, list(words)))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("settings", [{"beam_size": 1}, {"beam_size": 3}, {"sampling": True, "beam_size": 1}])
def test_weights_that_are_no_numbers_end_in_one_message(make_random_model: MakeModel, settings: dict[str, Any]) -> None:
    for value in (math.nan, math.inf):
        model = make_random_model(9)
        with torch.no_grad():
            model.output_weight.fill_(value)
        with pytest.raises(UserError, match="the model's weights are not finite"):
            searcher([model], **settings).search(inputs(LINES))


def test_each_token_is_announced_and_the_search_can_be_left_there(make_random_model: MakeModel) -> None:
    def leave() -> None:
        told.append(1)
        if len(told) == 3:
            raise KeyError("enough")

    told: list[int] = []
    one = searcher([make_random_model(9)], beam_size=2)
    one.each_token = leave
    with pytest.raises(KeyError, match="enough"):
        one.search(inputs(LINES))
    assert len(told) == 3


def has_no_repeat(words: list[int], size: int) -> bool:
    ngrams = [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]
    return len(set(ngrams)) == len(ngrams)


SOURCES = [[3, 4, EOS], [5, EOS]]
LONGEST = [5, 4]


@pytest.mark.slow
@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize(
    ("prefixes", "ngram_size"), [([[4], []], 0), ([[5, 3], [4]], 0), ([[], []], 1), ([[3], []], 2)]
)
def test_a_wide_beam_finds_what_enumerating_all_translations_that_keep_the_constraints_finds(
    prefixes: list[list[int]], ngram_size: int, num_models: int, make_random_model: MakeModel
) -> None:
    models = [make_random_model(6, seed=seed) for seed in range(6, 6 + num_models)]
    settings = dict(beam_size=81, n_best=20, max_extra_tokens=2, no_repeat_ngram_size=ngram_size)
    together = searcher(models, **settings).search(inputs(SOURCES, prefixes))
    for source, prefix, longest, found in zip(SOURCES, prefixes, LONGEST, together, strict=True):

        def is_allowed(words: list[int], prefix: list[int] = prefix) -> bool:
            begins = words[: len(prefix)] == prefix
            return begins and (not ngram_size or has_no_repeat(words, ngram_size))

        expected = enumerated(models, source, longest, is_allowed)[:20]
        assert [h.tokens for h in found] == [words for _, words in expected]
        assert [h.score for h in found] == pytest.approx([score for score, _ in expected], rel=1e-5)


@pytest.mark.parametrize("settings", [{"beam_size": 3, "n_best": 3}, {"sampling": True, "n_best": 3}], ids=str)
def test_an_ensemble_of_one_model_twice_is_the_model(settings: dict[str, Any], make_random_model: MakeModel) -> None:
    model = make_random_model(9)
    alone, twice = (searcher(models, **settings).search(inputs(LINES)) for models in ([model], [model, model]))
    assert tokens_of(alone) == tokens_of(twice)
    for one, other in zip(alone, twice, strict=True):
        assert [h.score for h in one] == pytest.approx([h.score for h in other])


def test_an_ensemble_is_neither_of_its_models(make_random_model: MakeModel) -> None:
    models = [make_random_model(9, seed=seed) for seed in (6, 7)]
    both = tokens_of(searcher(models).search(inputs(LINES)))
    assert all(both != tokens_of(searcher([model]).search(inputs(LINES))) for model in models)


def test_models_of_an_ensemble_may_differ_in_size(make_random_model: MakeModel) -> None:
    models = [make_random_model(9), make_random_model(9, num_heads=1, num_decoder_layers=1, d_ff=24)]
    for source, found in zip(LINES, searcher(models, n_best=2).search(inputs(LINES)), strict=True):
        for hypothesis in found:
            expected = math.log(probability(models, source, hypothesis.tokens))
            assert hypothesis.log_probability == pytest.approx(expected, rel=1e-5)


BEAM: dict[str, Any] = {"beam_size": 4, "n_best": 4}
SAMPLES: dict[str, Any] = {"sampling": True, "n_best": 3, "top_k": 5, "top_p": 0.9}
REPEATS: dict[str, Any] = {"beam_size": 3, "n_best": 2, "no_repeat_ngram_size": 2}


@pytest.mark.parametrize("settings", [BEAM, SAMPLES, REPEATS, {**SAMPLES, "no_repeat_ngram_size": 1}], ids=str)
def test_neither_order_nor_company_changes_a_translation(
    settings: dict[str, Any], make_random_model: MakeModel
) -> None:
    search = searcher([make_random_model(9)], **settings).search
    batch = inputs(LINES, [[], [4, 5], [3], [], [5] * 7])
    together = tokens_of(search(batch))
    assert tokens_of(search(batch[::-1])) == together[::-1]
    assert [tokens_of(search([sentence]))[0] for sentence in batch] == together
    assert all(
        found[0][: len(sentence.prefix)] == sentence.prefix for sentence, found in zip(batch, together, strict=True)
    )


@pytest.mark.parametrize("settings", [BEAM, SAMPLES, REPEATS], ids=str)
def test_the_forced_score_of_a_found_translation_is_its_score_in_the_search(
    settings: dict[str, Any], make_random_model: MakeModel
) -> None:
    models = [make_random_model(9, seed=seed) for seed in (6, 7)]
    for source, found in zip(LINES, searcher(models, **settings).search(inputs(LINES)), strict=True):
        for hypothesis in found:
            target_in, target_out = torch.tensor([[BOS, *hypothesis.tokens]]), torch.tensor([[*hypothesis.tokens, EOS]])
            forced = forced_log_probabilities(models, torch.tensor([source]), target_in, target_out)
            assert hypothesis.log_probability == pytest.approx(float(forced.sum()), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"sampling": True}], ids=str)
def test_a_prefix_longer_than_the_longest_output_is_kept_and_ended(
    settings: dict[str, Any], make_random_model: MakeModel
) -> None:
    prefix = [4, 4, 4, 3, 5, 5, 6]
    (found,) = searcher([make_random_model(9)], **settings).search(inputs([[3, EOS]], [prefix]))
    assert found[0].tokens == prefix


def test_a_prefix_beyond_the_learned_positions_is_refused(make_random_model: MakeModel) -> None:
    models = [make_random_model(9, positions="learned", max_positions=number) for number in (20, 9)]
    search = searcher(models)
    assert search.max_positions == 9
    assert len(search.search(inputs([[3, EOS]], [[4] * 8]))[0][0].tokens) == 8
    with pytest.raises(UserError, match=r"line 1: its prefix has 9 tokens, but .* at most 8 .* give a shorter prefix"):
        search.search(inputs([[3, EOS]], [[4] * 9]))


def test_models_without_a_longest_sentence_give_none(make_random_model: MakeModel) -> None:
    assert searcher([make_random_model(9)]).max_positions is None
