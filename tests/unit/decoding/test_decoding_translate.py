"""Lines in, lines out: order, blank lines, batches, any length."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from dist_transformer.config.models import DecodingConfig
from dist_transformer.decoding import translate
from dist_transformer.decoding.translate import pad_together, token_batches, translate_lines, translate_together
from dist_transformer.errors import UserError
from dist_transformer.model.transformer import Transformer

WORDS = ["<pad>", "<bos>", "<eos>", "one", "two", "three", "four", "five", "six"]
LINES = ["one", "six five four three", "", "two two", "three one four one five", "   ", "six", "five five", "two one"]


class WordTokenizer:
    """Each word an id."""

    pad_id, bos_id, eos_id = 0, 1, 2

    def encode_source(self, sentences: list[str]) -> list[list[int]]:
        return [[*(WORDS.index(word) for word in sentence.split()), self.eos_id] for sentence in sentences]

    def decode_target(self, ids: list[int]) -> str:
        return " ".join(WORDS[index] for index in ids)


@pytest.fixture
def model(make_random_model: Callable[..., Transformer]) -> Transformer:
    return make_random_model(len(WORDS))


def translated(model: Transformer, lines: list[str], max_tokens: int = 8192) -> list[str]:
    config = DecodingConfig(beam_size=2, max_extra_tokens=3, max_tokens=max_tokens)
    return list(translate_lines(model, WordTokenizer(), iter(lines), config, torch.device("cpu")))


def test_each_line_is_translated_as_if_alone_and_in_order(model: Transformer) -> None:
    together = translated(model, LINES)
    assert together == [translated(model, [line])[0] for line in LINES]
    assert len(set(together)) > 3


def test_blank_lines_give_empty_lines(model: Transformer) -> None:
    together = translated(model, LINES)
    assert together[2] == together[5] == ""
    assert translated(model, ["", " "]) == ["", ""]
    assert translated(model, []) == []


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_lines_cross_chunks_and_small_batches_unchanged(
    chunk: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = translated(model, LINES)
    monkeypatch.setattr(translate, "CHUNK_LINES", chunk)
    assert translated(model, LINES, max_tokens=10) == expected


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

    translations = translate_lines(model, WordTokenizer(), endless(), DecodingConfig(), torch.device("cpu"))
    next(translations)
    assert len(read) == 3


@dataclass
class LonelyRank:
    """One rank of a group that it never hears of: `gather` keeps what it was given."""

    rank: int
    num_ranks: int
    given: list[dict[int, str]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def gather(self, value: dict[int, str]) -> list[dict[int, str]]:
        self.given.append(value)
        return [value]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_over_any_number_of_ranks_each_line_is_translated_once_as_by_one(
    num_ranks: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "CHUNK_LINES", 5)
    config = DecodingConfig(beam_size=2, max_extra_tokens=3, max_tokens=10)
    group = [LonelyRank(rank, num_ranks) for rank in range(num_ranks)]
    moved: list[list[int]] = [[] for _ in group]
    for rank, calls in zip(group, moved, strict=True):
        translate_together(model, WordTokenizer(), LINES, config, rank, partial(calls.append, 1))  # type: ignore[arg-type]
    found = [line for rank in group for line in rank.given[0].items()]
    assert len(dict(found)) == len(found)
    expected = translated(model, LINES, max_tokens=10)
    assert [dict(found).get(line, "") for line in range(len(LINES))] == expected
    assert len({len(calls) for calls in moved}) == 1  # every rank hears of every batch
    assert len(moved[0]) > 3


def test_batches_hold_every_sentence_once_within_the_budget() -> None:
    lengths = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    config = DecodingConfig(beam_size=4, max_tokens=160)
    batches = list(token_batches(lengths, config))
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) * 4 <= 160
    fill = sum(lengths) / sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    assert fill > 0.9


def test_padding_goes_to_the_end() -> None:
    assert pad_together([[5, 2], [6, 7, 2]], 0).tolist() == [[5, 2, 0], [6, 7, 2]]


def test_a_line_longer_than_the_learned_positions_is_refused_by_its_number(
    make_random_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "CHUNK_LINES", 2)
    model = make_random_model(len(WORDS), positions="learned", max_positions=5)
    config = DecodingConfig(beam_size=2, max_extra_tokens=3)
    fits, too_long = "one two three four", "one two three four five"  # and the end of sentence
    translations = translate_lines(model, WordTokenizer(), [fits, "", fits, too_long], config, torch.device("cpu"))
    for _ in range(2):
        next(translations)
    with pytest.raises(UserError, match=r"line 4: 6 tokens, but the model learned only 5 positions"):
        next(translations)
