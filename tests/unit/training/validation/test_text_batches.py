"""Micro-batches of text that is not prepared: every pair once, within the budget, as the tokenizer has it."""

import pytest
from rows_helpers import PAIRS, TOKENIZER, write_tokenizer

from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import DataError
from dist_transformer.training.validation import translation as module
from dist_transformer.training.validation.translation import text_batches

SOURCES, TARGETS = (list(side) for side in zip(*PAIRS, strict=True))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder / TOKENIZER)


def batches_of(tokenizer, sources, targets, max_positions=None, max_tokens=256):
    builder = WindowBuilder(None, max_tokens, tokenizer.special, 1)
    return list(text_batches(builder, tokenizer, sources, targets, max_positions, "data.more_validation.news"))


def pairs_in(batches, tokenizer):
    """(row id, source ids, target ids) of every pair, without padding."""
    found = []
    for batch in batches:
        assert (batch.target_in_BT[:, 0] == tokenizer.bos_id).all()
        assert batch.target_in_BT[:, 1:].equal(batch.target_out_BT[:, :-1])
        for row, source, target in zip(batch.row_ids, batch.source_BS, batch.target_out_BT, strict=True):
            sides = [[i for i in side.tolist() if i != tokenizer.pad_id] for side in (source, target)]
            found.append((int(row), *sides))
    return sorted(found)


@pytest.mark.parametrize("chunk", [7, 4096])
def test_every_pair_comes_once_with_its_tokens(tokenizer, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_PAIRS", chunk)
    batches = batches_of(tokenizer, SOURCES, TARGETS)
    encoded = zip(tokenizer.encode_source(SOURCES), tokenizer.encode_target(TARGETS), strict=True)
    assert pairs_in(batches, tokenizer) == [(row, *pair) for row, pair in enumerate(encoded)]
    assert sum(b.shape.target_tokens for b in batches) == sum(map(len, tokenizer.encode_target(TARGETS)))
    assert all(batch.shape.padded_tokens <= 256 for batch in batches)


def test_nothing_is_dropped_neither_empty_sides_nor_pairs_above_the_budget(tokenizer):
    sources, targets = ["", " ".join(SOURCES), "one", ""], ["eins", " ".join(TARGETS), "", ""]
    batches = batches_of(tokenizer, sources, targets)
    assert [row for row, *_ in pairs_in(batches, tokenizer)] == [0, 1, 2, 3]
    assert any(batch.shape.padded_tokens > 256 for batch in batches)


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_the_learned_positions_cannot_take_is_named_by_its_line(tokenizer, side, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_PAIRS", 2)
    texts = [["one"] * 5, ["eins"] * 5]
    texts[side][3] = " ".join(SOURCES[:5])
    said = r"data.more_validation.news, line 4: \d+ tokens, .* only 20 positions, .*: raise model.max_positions"
    with pytest.raises(DataError, match=said):
        batches_of(tokenizer, *texts, max_positions=20)
