"""Word alignment and the file of attention weights, from the model's own maps."""

from collections.abc import Callable

import pytest
import torch
from word_tokenizer import WORDS, WordTokenizer

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.decoding.translate import Translation
from dist_transformer.decoding.translation_lines import links, word_alignment, words_of
from dist_transformer.model.transformer import Transformer

SENTENCES = ["The old man sees the house .", "a b c d e f g h", "It is nine o'clock now, my friend."] * 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "one.model"
    train_tokenizer(iter(SENTENCES), TokenizerConfig(vocabulary_size=64), path, ["<2de>"])
    return Tokenizer.load(path)


def translation_of(tokens: list[int]) -> Translation:
    return Translation(WordTokenizer().decode_target(tokens), tokens, -1.0, -1.0)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_target_word_goes_to_the_source_word_with_most_weight_in_the_last_layer_but_one(
    layers: int, make_random_model: Callable[..., Transformer]
) -> None:
    model = make_random_model(len(WORDS), num_decoder_layers=layers)
    line, tokens = " one two five three ", [4, 3, 8, 5, 5]
    maps = model.attention_maps(torch.tensor([[3, 4, 7, 5, 2]]), torch.tensor([[1, *tokens]]))
    weights = maps.cross[max(0, layers - 2)][0].mean(0)
    expected = [(int(weights[word, :4].argmax()), word) for word in range(5)]
    assert word_alignment(model, WordTokenizer(), line, translation_of(tokens)) == expected
    assert word_alignment(model, WordTokenizer(), "  ", translation_of(tokens)) == []
    assert word_alignment(model, WordTokenizer(), line, translation_of([])) == []


def test_the_weights_of_the_pieces_of_a_word_are_added_up() -> None:
    weights = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.1, 0.7], [0.5, 0.3, 0.2]])
    assert links(weights, [0, 1, 1], [0, 1, 1]) == [(1, 0), (1, 1)]
    assert links(weights, [0, 1, 1], [0, 1, 2]) == [(1, 0), (1, 1), (0, 2)]
    assert links(weights, [0, 1, 2], [0, 2, 2]) == [(0, 0), (2, 2)]


@pytest.mark.parametrize(
    "text", [" ".join(s.split()) for s in SENTENCES[:3]] + ["ho Ω use", "<2de>  the  ﬁrst ΩΩ x", "Ω"]
)
def test_every_word_of_a_text_has_its_pieces_and_no_others(tokenizer: Tokenizer, text: str) -> None:
    words = text.split()
    (ids,) = tokenizer.encode_source([text])
    spans = tokenizer.source_spans(text)
    assert len(spans) == len(ids)
    found = words_of(text, spans[:-1])
    assert found == sorted(found)
    assert set(found) == set(range(len(words)))
    for word, piece in zip(found, tokenizer.source_pieces(ids), strict=False):
        if piece != "<unk>" and words[word].isascii():
            assert piece.replace("▁", "") in words[word]


def test_words_of_a_translation_are_those_of_its_text(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_target(["the Ω house is nine"])
    ids = [*ids[:-1], 10_000]  # an id beyond the last piece
    assert tokenizer.target_pieces(ids)[-1] == ""
    text = tokenizer.decode_target(ids)
    found = words_of(text, tokenizer.target_spans(ids))
    assert len(found) == len(ids)
    assert found == sorted(found)
    assert set(found) == set(range(len(text.split()))) == set(range(5))
