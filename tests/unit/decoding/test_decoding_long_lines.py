"""Lines that are too long: cut between sentences, words or characters, nothing lost; joined as the script is written."""

import random

import pytest

from dist_transformer.decoding.long_lines import cut_line, join_parts
from dist_transformer.errors import UserError


def num_characters(text: str) -> int:
    return len(text)


def num_words(text: str) -> int:
    return len(text.split())


def test_parts_are_short_enough_and_lose_nothing() -> None:
    chooser = random.Random(1)
    for _ in range(200):
        words = ["".join(chooser.choices("abc.!?…。", k=chooser.randint(1, 12))) for _ in range(chooser.randint(1, 40))]
        line, most = " ".join(words), chooser.randint(1, 30)
        parts = cut_line(line, num_characters, most)
        assert max(map(len, parts)) <= most
        assert all(part == part.strip() for part in parts)
        assert "".join(parts).replace(" ", "") == line.replace(" ", "")
        assert (parts == [line]) == (len(line) <= most)


def test_a_line_is_cut_between_sentences_where_it_can_be() -> None:
    line = 'The first one is here. "Is this the second?" Yes! And this is the last of them'
    parts = cut_line(line, num_words, 8)
    assert parts == ["The first one is here.", '"Is this the second?"', "Yes! And this is the last of them"]
    assert cut_line("今日は晴れです。明日は雨が降ります。", num_characters, 10) == [
        "今日は晴れです。",
        "明日は雨が降ります。",
    ]


def test_a_sentence_is_cut_between_words_and_a_word_between_characters_only_where_it_must_be() -> None:
    assert cut_line("one two three four five six", num_words, 3) == ["one two three", "four five six"]
    assert cut_line("one two-three-four", num_characters, 8) == ["one", "two-thr", "ee-four"]


@pytest.mark.slow
def test_a_line_of_nothing_but_full_stops_is_cut_like_any_other() -> None:
    """Looked for from each of them, the end of a sentence would take an hour."""
    line = "." * 200_000
    assert cut_line(line, num_characters, 1000) == [
        line[:n] for n in map(len, cut_line("a" * 200_000, num_characters, 1000))
    ]
    parts = cut_line(f"One{line} two{line}' three", num_characters, 200_005)
    assert parts == [f"One{line}", f"two{line}'", "three"]


@pytest.mark.parametrize("tags", ["<2de> <news> ", ">>deu<< <news> ", "__pt-BR__ >>x<< "])
def test_the_tags_of_a_line_are_put_before_each_part(tags: str) -> None:
    assert cut_line(f"{tags}one two three four", num_words, 4) == [f"{tags}one two", f"{tags}three four"]
    assert cut_line("one <2de> two", num_words, 2) == ["one", "<2de> two"], "only at its beginning it is a tag"
    assert cut_line("_" * 200_000, num_characters, 100_000) == ["_" * 100_000] * 2


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match="“<2de> a”: 7 tokens, and cannot be cut into parts of at most 6"):
        cut_line("<2de> abc", num_characters, 6)


def test_parts_are_joined_with_a_space_where_their_script_has_spaces() -> None:
    assert join_parts(["Ein Satz.", "", "Noch einer."]) == "Ein Satz. Noch einer."
    assert join_parts(["今日は晴れ。", "明日は雨。"]) == "今日は晴れ。明日は雨。"
    assert join_parts(["오늘은 맑다.", "내일은 비가 온다."]) == "오늘은 맑다. 내일은 비가 온다."
    assert join_parts(["", ""]) == ""
