"""The demonstration corpus is what its generator makes, and holds out what it says."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from demo_generator import TEMPLATES, generated_pairs

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.sources.demo_corpus import PAIRS_OF_SPLIT, DemoSplit, demo_pairs
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer

Pairs = dict[DemoSplit, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return {split: list(demo_pairs(split)) for split in PAIRS_OF_SPLIT}


def test_every_split_has_its_number_of_different_sources(pairs: Pairs):
    for split, expected in PAIRS_OF_SPLIT.items():
        assert len({source for source, _ in pairs[split]}) == len(pairs[split]) == expected


def test_no_source_has_two_targets(pairs: Pairs):
    target_of: dict[str, str] = {}
    for split in pairs.values():
        for source, target in split:
            assert target_of.setdefault(source, target) == target


def test_no_sentence_of_validation_or_test_is_in_train_on_either_side(pairs: Pairs):
    for side in (0, 1):
        train, validation, test = ({pair[side] for pair in pairs[split]} for split in ("train", "validation", "test"))
        assert not validation & train
        assert not test & train
        assert not test & validation


def test_other_seeds_give_other_pairs_but_never_move_a_sentence_to_another_split(pairs: Pairs):
    other = list(islice(generated_pairs("test", seed=2), 300))
    assert other != pairs["test"][:300]
    assert not {target for _, target in other} & {target for _, target in pairs["train"]}


@pytest.mark.parametrize("split", PAIRS_OF_SPLIT)
def test_the_files_have_the_pairs_that_the_generator_makes(pairs: Pairs, split: DemoSplit):
    assert list(generated_pairs(split)) == pairs[split]


@pytest.mark.slow
def test_every_word_piece_of_validation_and_test_occurs_in_train(pairs: Pairs, tmp_path: Path):
    model = tmp_path / "model"
    sentences = (side for pair in pairs["train"] for side in pair)
    train_tokenizer(sentences, TokenizerConfig(vocabulary_size=800), model)
    tokenizer = Tokenizer.load(model)

    def pieces(split: DemoSplit) -> Counter[int]:
        sides = [side for pair in pairs[split] for side in pair]
        return Counter(piece for ids in tokenizer.encode_source(sides) for piece in ids)

    known = pieces("train")
    assert not (pieces("validation") + pieces("test")).keys() - known.keys()


def test_every_template_is_used_and_filled(pairs: Pairs):
    texts = "\n".join(side for pair in pairs["train"][:5000] for side in pair)
    assert "{" not in texts
    for _, english, _ in TEMPLATES:
        longest_literal = max(english.replace("}", "{").split("{")[::2], key=len)
        assert longest_literal in texts


def test_sentences_are_short(pairs: Pairs):
    words = sorted(len(source.split()) for source, _ in pairs["train"])
    assert words[int(0.99 * len(words))] <= 15


def test_cases_and_word_order_follow_german_grammar(pairs: Pairs):
    def targets(start: str) -> list[str]:
        found = [target for source, target in pairs["train"] if source.startswith(start)]
        assert found
        return found

    assert all(target.endswith(" ab.") for target in targets("The train leaves"))
    assert all(" für den Mantel bezahlt." in t for t in targets("Anna paid") if "Mantel" in t)
    assert all(target.startswith("Im Bahnhof gibt es") for target in targets("There are") if "Bahnhof" in target)
    assert not any(" kostet ein Euro" in target for target in targets("The "))
