"""Lines in, lines out: order, blank lines, batches, any length, prefixes, several translations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from word_tokenizer import WORDS, WordTokenizer

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding import translate
from dist_transformer.decoding.beam import length_penalty
from dist_transformer.decoding.search import TorchSearcher, pad_together
from dist_transformer.decoding.translate import (
    Translation,
    first_batch,
    token_batches,
    translate_lines,
    translate_together,
)
from dist_transformer.errors import UserError
from dist_transformer.model.search_interface import Hypothesis, SearchInput
from dist_transformer.model.transformer import Transformer

LINES = ["one", "six five four three", "", "two two", "three one four one five", "   ", "six", "five five", "two one"]
SETTINGS: dict[str, Any] = {"beam_size": 2, "max_extra_tokens": 3}


@pytest.fixture
def model(make_random_model: Callable[..., Transformer]) -> Transformer:
    return make_random_model(len(WORDS))


def searcher_of(model: Transformer, config: DecodingConfig) -> TorchSearcher:
    return TorchSearcher([model], SpecialTokens(1, 2, 0), config, torch.device("cpu"))


def all_translated(
    model: Transformer, lines: Sequence[str], prefixes: Sequence[str] | None = None, num_before: int = 0, **given: Any
) -> list[list[Translation]]:
    config = DecodingConfig(**{**SETTINGS, **given})
    searcher = searcher_of(model, config)
    return list(translate_lines(searcher, WordTokenizer(), iter(lines), config, prefixes, num_before))


def translated(model: Transformer, lines: Sequence[str], **given: Any) -> list[str]:
    return [best.text for best, *_ in all_translated(model, lines, **given)]


class Shouting:
    """A searcher that needs no model: it answers a source with itself, twice, and remembers what it was asked."""

    max_positions = None

    def __init__(self) -> None:
        self.asked: list[SearchInput] = []

    def search(self, batch: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        self.asked += batch
        return [
            [Hypothesis([*each.prefix, *each.source[:-1] * times], -1.0 * times, -2.0 * times) for times in (1, 2)]
            for each in batch
        ]


@pytest.mark.parametrize(
    ("lines", "prefixes"), [(["one", "ok \ud800 x"], None), (["one", "two"], ["", "\udfff"])], ids=["line", "prefix"]
)
def test_half_a_surrogate_pair_is_refused_with_its_line(
    model: Transformer, lines: list[str], prefixes: list[str] | None
):
    with pytest.raises(UserError, match="line 7: not valid Unicode: half of a surrogate pair"):
        all_translated(model, lines, prefixes, num_before=5)


def test_each_line_is_translated_as_if_alone_and_in_order(model: Transformer) -> None:
    together = translated(model, LINES)
    assert together == [translated(model, [line])[0] for line in LINES]
    assert len(set(together)) > 3


def test_blank_lines_give_empty_lines(model: Transformer) -> None:
    together = translated(model, LINES)
    assert together[2] == together[5] == ""
    assert all_translated(model, ["", " "], ["one", ""]) == [[Translation("", [], 0.0, 0.0)]] * 2
    assert translated(model, []) == []


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_lines_cross_chunks_and_small_batches_unchanged(
    chunk: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = translated(model, LINES)
    monkeypatch.setattr(translate, "CHUNK_LINES", chunk)
    assert translated(model, LINES, max_tokens=10) == expected


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_samples_of_a_line_depend_on_its_number_alone(
    chunk: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["one two three"] * 4 + LINES
    sampling: dict[str, Any] = {"sampling": True, "n_best": 3, "seed": 5}
    expected = all_translated(model, lines, **sampling)
    assert len({tuple(t.text for t in line) for line in expected[:4]}) > 1, "each line draws for itself"
    monkeypatch.setattr(translate, "CHUNK_LINES", chunk)
    found = all_translated(model, lines, max_tokens=10, **sampling)
    assert [[t.tokens for t in line] for line in found] == [[t.tokens for t in line] for line in expected]
    later = all_translated(model, lines[5:], num_before=5, **sampling)
    assert [[t.tokens for t in line] for line in later] == [[t.tokens for t in line] for line in expected[5:]]


def test_a_line_beyond_the_budget_goes_alone(model: Transformer) -> None:
    long_line = " ".join(WORDS[3 + number % 6] for number in range(300))
    assert translated(model, [long_line, "one"], max_tokens=20) == translated(model, [long_line, "one"])


def test_no_more_than_a_chunk_is_read_ahead(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "CHUNK_LINES", 3)
    read: list[str] = []

    def endless() -> Iterator[str]:
        while True:
            read.append("one")
            yield "one"

    config = DecodingConfig()
    next(translate_lines(searcher_of(model, config), WordTokenizer(), endless(), config))
    assert len(read) == 3


def test_the_best_translations_come_with_their_scores_and_each_begins_with_its_prefix(model: Transformer) -> None:
    prefixes = ["two", "", "one", "five six", "", "", "six", "", ""]
    found = all_translated(model, LINES, prefixes, n_best=2)
    free = all_translated(model, LINES, n_best=2)
    for line, prefix, translations, others in zip(LINES, prefixes, found, free, strict=True):
        if not line.strip():
            continue
        assert len(translations) == 2
        assert translations[0].score >= translations[1].score
        for translation in translations:
            assert translation.text.startswith(prefix)
            assert translation.text == WordTokenizer().decode_target(translation.tokens)
            assert translation.log_probability <= translation.score < 0
        if not prefix:
            assert translations == others


@pytest.mark.parametrize("prefixes", [["one"], ["one"] * 3])
def test_another_number_of_prefixes_than_lines_is_refused(prefixes: list[str]) -> None:
    ended = "lines end before number 3" if len(prefixes) == 3 else "prefixes end before number 2"
    with pytest.raises(UserError, match=f"{ended}: expected a prefix for each line"):
        list(translate_lines(Shouting(), WordTokenizer(), ["one", "two"], DecodingConfig(), prefixes))


def test_an_end_of_line_in_a_translation_becomes_a_space() -> None:
    class Broken(WordTokenizer):
        def decode_target(self, ids: list[int]) -> str:
            return "a\nb"

    ((best, *_),) = translate_lines(Shouting(), Broken(), ["one"], DecodingConfig())
    assert best.text == "a b"


def test_a_long_line_is_cut_translated_in_parts_and_joined() -> None:
    searcher, config = Shouting(), DecodingConfig(max_source_tokens=4, too_long="split")
    lines = ["one two three", "one two three four. five six one two three", "six"]
    found = list(translate_lines(searcher, WordTokenizer(), lines, config, ["", "six", ""]))
    assert [best.text for best, *_ in found] == [lines[0], f"six {lines[1]}", lines[2]]
    second = found[1][1]
    num_parts = len([each for each in searcher.asked if each.number % translate.NUMBERS_OF_A_PART == 1])
    assert num_parts > 2
    assert (second.score, second.log_probability) == (-2.0 * num_parts, -4.0 * num_parts)
    assert max(len(each.source) for each in searcher.asked) <= 4
    assert len({each.number for each in searcher.asked}) == len(searcher.asked), "each part draws for itself"
    assert sum(bool(each.prefix) for each in searcher.asked) == 1


@dataclass
class LonelyRank:
    """One rank of a group that it never hears of: `all_gather_object` keeps what it was given last."""

    rank: int
    num_ranks: int
    given: Any = None

    def all_gather_object(self, value: Any) -> list[Any]:
        self.given = value
        return [value]

    def start_sum(self, values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: values)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_over_any_number_of_ranks_each_line_is_translated_once_as_by_one(
    num_ranks: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "CHUNK_LINES", 5)
    config = DecodingConfig(**SETTINGS, max_tokens=10)
    searcher = searcher_of(model, config)
    group = [LonelyRank(rank, num_ranks) for rank in range(num_ranks)]
    moved: list[list[int]] = [[] for _ in group]
    for rank, calls in zip(group, moved, strict=True):
        translate_together(searcher, WordTokenizer(), LINES, config, rank, partial(calls.append, 1), lambda: False)  # type: ignore[arg-type]
    found = [line for rank in group for line in rank.given.items()]
    assert len(dict(found)) == len(found)
    expected = translated(model, LINES, max_tokens=10)
    assert [dict(found).get((line, 0), "") for line in range(len(LINES))] == expected
    num_batches = sum(len(calls) for calls in moved) // num_ranks * num_ranks
    assert len({len(calls) for calls in moved}) == 1  # every rank hears of every round
    assert num_batches > 3


def test_the_first_batch_is_known_beforehand() -> None:
    config, searcher = DecodingConfig(**SETTINGS, max_tokens=14), Shouting()
    alone = first_batch(WordTokenizer(), LINES, config)
    translate_together(searcher, WordTokenizer(), LINES, config, LonelyRank(0, 1), list, lambda: False)  # type: ignore[arg-type]
    assert WordTokenizer().encode_source(alone) == [each.source for each in searcher.asked[: len(alone)]]
    assert alone == [LINES[4]]
    assert first_batch(WordTokenizer(), [], config) == []


def test_together_parts_of_a_long_line_are_joined_in_order() -> None:
    config = DecodingConfig(max_source_tokens=4, too_long="split")
    lines = ["six", "one two three four five six one two three four five", ""]
    found = translate_together(Shouting(), WordTokenizer(), lines, config, LonelyRank(0, 1), list, lambda: False)  # type: ignore[arg-type]
    assert found == lines


def test_batches_hold_every_sentence_once_within_the_budget() -> None:
    lengths = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    settings = ({"beam_size": 4}, {"beam_size": 1, "n_best": 4, "sampling": True})
    for config in (DecodingConfig(**given, max_tokens=160) for given in settings):
        batches = list(token_batches(lengths, config))
        assert sorted(index for batch in batches for index in batch) == list(range(200))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) * 4 <= 160
        fill = sum(lengths) / sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
        assert fill > 0.9


def test_padding_goes_to_the_end() -> None:
    assert pad_together([[5, 2], [6, 7, 2]], 0).tolist() == [[5, 2, 0], [6, 7, 2]]


@pytest.mark.parametrize("limit", ["model.max_positions", "decoding.max_source_tokens"])
def test_a_line_that_is_too_long_is_refused_by_its_number(
    limit: str, make_random_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "CHUNK_LINES", 2)
    learned: dict[str, Any] = {"positions": "learned", "max_positions": 5} if limit.startswith("model") else {}
    model = make_random_model(len(WORDS), **learned)
    config = DecodingConfig(**SETTINGS, max_source_tokens=2048 if learned else 5)
    fits, too_long = "one two three four", "one two three four five"  # and the end of sentence
    translations = translate_lines(searcher_of(model, config), WordTokenizer(), [fits, "", fits, too_long], config)
    for _ in range(2):
        next(translations)
    with pytest.raises(UserError, match=rf"line 4: 6 tokens, but at most 5 are translated at once \({limit}\)"):
        next(translations)


def test_a_prefix_beyond_the_positions_and_a_character_beyond_the_limit_are_refused_by_the_line() -> None:
    class Narrow(Shouting):
        max_positions = 5  # type: ignore[assignment]

    searcher, lines = Narrow(), ["one", "one two three four"]
    with pytest.raises(
        UserError, match="line 2: its prefix has 5 tokens, but a translation of this model has at most 4"
    ):
        next(translate_lines(searcher, WordTokenizer(), lines, DecodingConfig(), ["two", "one one one one one"]))
    assert not searcher.asked, "the longest line, which is fine, would be searched for first"

    class Letters(WordTokenizer):
        def encode_source(self, sentences: list[str]) -> list[list[int]]:
            return [[3] * 9 * len(sentence) + [2] for sentence in sentences]

    config = DecodingConfig(max_source_tokens=4, too_long="split")
    with pytest.raises(UserError, match="line 2: “o”: 10 tokens, and cannot be cut into parts of at most 4"):
        next(translate_lines(searcher, Letters(), ["", "one"], config))


def test_a_length_penalty_beyond_what_numbers_hold_is_refused() -> None:
    greatest = DecodingConfig(length_penalty=10).length_penalty
    assert length_penalty(10_000, greatest) < torch.finfo(torch.float32).max
    with pytest.raises(ValidationError, match="less than or equal to 10"):
        DecodingConfig(length_penalty=1e5)
