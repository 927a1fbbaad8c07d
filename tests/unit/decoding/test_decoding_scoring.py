"""Scores of given pairs: one number for each token, whatever the batches, equal to what a search says of its finds."""

import math
from collections.abc import Callable

import pytest
import torch
from word_tokenizer import WORDS, WordTokenizer

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding import scoring
from dist_transformer.decoding.scoring import score_pairs
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.decoding.translate import translate_lines
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer

CPU = torch.device("cpu")
LINES = ["one two", "six", "three three four five one", "five"]


def test_what_a_search_found_has_the_log_probability_that_the_search_gave(
    make_random_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [make_random_model(len(WORDS), seed=seed) for seed in (1, 2)]
    config = DecodingConfig(beam_size=3, n_best=3, max_extra_tokens=3)
    searcher = TorchSearcher(models, SpecialTokens(1, 2, 0), config, CPU)
    found = list(translate_lines(searcher, WordTokenizer(), LINES, config))
    pairs = [(line, t.text) for line, translations in zip(LINES, found, strict=True) for t in translations]
    expected = [t.log_probability for translations in found for t in translations]
    for chunk in (2048, 5):
        monkeypatch.setattr(scoring, "CHUNK_LINES", chunk)
        scored = list(score_pairs(models, WordTokenizer(), pairs, CPU))
        assert [ids for ids, _ in scored] == WordTokenizer().encode_target([text for _, text in pairs])
        assert all(len(ids) == len(values) for ids, values in scored)
        assert [sum(values) for _, values in scored] == pytest.approx(expected, rel=1e-5)


def test_the_probabilities_of_all_next_tokens_sum_to_one(make_random_model: Callable[..., Transformer]) -> None:
    model = make_random_model(len(WORDS))
    pairs = [("one two", f"three {word}") for word in WORDS[3:]]
    scored = [values for _, values in score_pairs([model], WordTokenizer(), pairs, CPU)]
    assert len({round(values[0], 6) for values in scored}) == 1
    probabilities = model(torch.tensor([[3, 4, 2]]), torch.tensor([[1, 5]]))[0, 1].softmax(-1).detach()
    assert sum(torch.tensor(values[1]).exp() for values in scored) == pytest.approx(
        float(probabilities[3:].sum()), rel=1e-5
    )


def test_a_sentence_longer_than_the_positions_is_refused_by_its_number(
    make_random_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_LINES", 1)
    model = make_random_model(len(WORDS), positions="learned", max_positions=4)
    pairs = [("one", "two"), ("one", "one two three four")]
    for most, limit in ((2048, r"the model has only 4 positions"), (3, r"at most 3 are scored at once")):
        scored = score_pairs([model], WordTokenizer(), pairs, CPU, most)
        next(scored)
        with pytest.raises(UserError, match=f"^line 2: 5 tokens, but {limit}"):
            next(scored)


def test_a_pair_that_is_too_long_is_scored_as_the_worst_if_it_is_not_refused(
    make_random_model: Callable[..., Transformer],
) -> None:
    """Whether its tokens are counted, or its characters are too many for them; the pairs beside it keep their scores."""
    model = make_random_model(len(WORDS), positions="learned", max_positions=4)
    long = " ".join(["one"] * 10_000)
    fit = [("one", "two"), ("five", "one two three")]
    pairs = [fit[0], ("one two three four", "one"), (long, long), fit[1]]
    scored = list(score_pairs([model], WordTokenizer(), pairs, CPU, files=None))
    assert scored[1][1] == scored[2][1] == [-math.inf]
    alone = list(score_pairs([model], WordTokenizer(), fit, CPU))
    for (ids, values), (expected_ids, expected) in zip([scored[0], scored[3]], alone, strict=True):
        assert ids == expected_ids
        assert values == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match=r"^en and de, line 2: \d+ tokens or more, but the model has only 4 positions"):
        list(score_pairs([model], WordTokenizer(), [fit[0], (long, long)], CPU, 2048, "en and de, "))
