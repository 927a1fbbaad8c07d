"""Modifiers: what each does to a pair, and that the same rows are modified in the same way wherever they are read."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.config.data_schema import MODIFIERS, DataConfig
from dist_transformer.data.loader.window_request import RowSlice
from dist_transformer.data.modifiers import INLINE_TAGS, Modifiers, inline_tags
from dist_transformer.data.sources.demo_corpus import demo_pairs

PAIRS = [pair for _, pair in zip(range(400), demo_pairs("train"), strict=False)]
NAMED = ("We met Anna Schmidt in Berlin on 12.5.", "Am 12.5. trafen wir Anna Schmidt in Berlin.")
EVERY = dict.fromkeys(MODIFIERS, 0.5)


def modified(
    shares: dict[str, float], pairs: Sequence[tuple[str, str]], prefix: str = "", seed: int = 1, pass_number: int = 0
) -> list[tuple[str, str]]:
    """These pairs, as the first rows of a row group, after modification."""
    source, target = [source for source, _ in pairs], [target for _, target in pairs]
    piece = RowSlice(0, 0, 0, len(pairs), pass_number)
    Modifiers(shares, seed, prefix).modify(piece, range(len(pairs)), source, target)
    return list(zip(source, target, strict=True))


def one(name: str, source: str, target: str, prefix: str = "", seed: int = 1) -> tuple[str, str]:
    (pair,) = modified({name: 1.0}, [(source, target)], prefix, seed)
    return pair


def test_the_list_of_names_has_a_change_for_each_and_a_share_of_none_changes_nothing():
    for name in MODIFIERS:
        changed = modified({name: 1.0}, [NAMED])
        assert changed != [NAMED], name
        assert modified({name: 0.0}, PAIRS) == modified({}, PAIRS) == PAIRS


@pytest.mark.parametrize(
    ("name", "pair", "expected"),
    [
        ("upper_case", ("Straße 3 of the <b>old</b> town.", "Die Straße"), ("STRASSE 3 OF THE <b>OLD</b> TOWN.", "DIE STRASSE")),
        ("upper_case", ("他回家。", "إنه يذهب"), ("他回家。", "إنه يذهب")),
        ("title_case", ("the well-known McDonald's (éa)", "er geht"), ("The Well-Known McDonald's (Éa)", "Er Geht")),
        ("title_case", ("<b>old</b> he's", "他回家。"), ("<b>Old</b> He's", "他回家。")),
        ("no_final_punctuation", ("Go home !", "Geh heim... "), ("Go home", "Geh heim")),
        ("no_final_punctuation", ("他回家。", "He goes home."), ("他回家", "He goes home")),
        ("no_final_punctuation", ("Go home", "Geh heim."), ("Go home", "Geh heim.")),
        ("no_final_punctuation", ("...", "Geh heim."), ("...", "Geh heim.")),
    ],
)  # fmt: skip
def test_case_and_punctuation_change_on_both_sides_but_for_markup_and_scripts_without(name, pair, expected):
    assert one(name, *pair) == expected


def test_the_tags_of_a_corpus_stay_at_the_head_of_the_source_as_they_are():
    for name in MODIFIERS:
        source, _ = one(name, "<2de> NEWS: We met Anna in Berlin.", "Wir trafen Anna in Berlin.", "<2de> NEWS: ")
        assert source.startswith("<2de> NEWS: ")
    assert one("upper_case", "news we met", "wir", "news ") == ("news WE MET", "WIR")


@pytest.mark.parametrize("seed", range(20))
def test_typos_and_noise_change_the_source_alone(seed):
    source, target = "Somebody bought nineteen <b>wonderful</b> bicycles.", "Jemand kaufte neunzehn Fahrräder."
    mistyped, same = one("typos", source, target, seed=seed)
    assert same == target
    words, others = source.split(" "), mistyped.split(" ")
    assert len(words) == len(others)
    changed = [(word, other) for word, other in zip(words, others, strict=True) if word != other]
    assert all(abs(len(word) - len(other)) <= 1 and word[0] == other[0] for word, other in changed)
    assert "<b>" in mistyped
    noisy, same = one("noise", source, target, seed=seed)
    assert same == target
    kept = [word for word in noisy.split(" ") if word in words]
    assert kept == words
    assert 1 <= len(noisy.split(" ")) - len(words) <= 3


def test_nearly_every_source_with_typos_differs_and_short_words_have_none():
    changed = sum(before != after for before, after in zip(PAIRS, modified({"typos": 1.0}, PAIRS), strict=True))
    assert changed > 0.75 * len(PAIRS)
    assert one("typos", "Go to it.", "Geh hin.") == ("Go to it.", "Geh hin.")


@pytest.mark.parametrize("seed", range(20))
def test_inline_tags_stand_around_the_same_names_and_numbers_of_both_sides(seed):
    tagged = one("tags", *NAMED, seed=seed)
    pairs = [dict(re.findall(r"<(\d)>(.*?)</\1>", side)) for side in tagged]
    assert pairs[0] == pairs[1]
    assert list(pairs[0]) == [str(number + 1) for number in range(len(pairs[0]))]
    assert 1 <= len(pairs[0]) <= 3
    assert set(pairs[0].values()) <= {"Anna", "Schmidt", "Berlin", "12.5"}
    assert tuple(re.sub("|".join(INLINE_TAGS), "", side) for side in tagged) == NAMED


def test_without_a_common_name_inline_tags_stand_around_both_sentences_or_at_the_same_end():
    found = {one("tags", "He goes.", "Er geht.", seed=seed) for seed in range(40)}
    assert found == {
        ("<1>He goes.</1>", "<1>Er geht.</1>"),
        ("<1></1>He goes.", "<1></1>Er geht."),
        ("He goes.<1></1>", "Er geht.<1></1>"),
    }


@given(st.text(max_size=60), st.text(max_size=60), st.integers(0, 2**32))
def test_any_text_can_be_modified_by_all_of_them_at_once(source, target, seed):
    modified(dict.fromkeys(MODIFIERS, 1.0), [(source, target)], seed=seed)


def test_each_modifier_takes_about_its_share_of_the_rows_independently_of_the_others():
    pairs = [NAMED] * 4000
    for name in MODIFIERS:
        count = sum(pair != NAMED for pair in modified({name: 0.1}, pairs))
        assert 300 < count < 500  # five standard deviations
    upper = {n for n, pair in enumerate(modified({"upper_case": 0.5}, pairs)) if pair != NAMED}
    noise = {n for n, pair in enumerate(modified({"noise": 0.5}, pairs)) if pair != NAMED}
    assert 850 < len(upper & noise) < 1150


def test_a_row_is_modified_in_the_same_way_in_any_slice_and_whatever_was_dropped_before_it():
    whole = modified(EVERY, PAIRS)
    for first, last in ((0, 7), (7, 8), (8, 250), (250, 400)):
        positions = [n for n in range(last - first) if n % 3 != 1]
        source, target = ([PAIRS[first + n][side] for n in positions] for side in (0, 1))
        Modifiers(EVERY, 1).modify(RowSlice(0, 0, first, last), positions, source, target)
        assert list(zip(source, target, strict=True)) == [whole[first + n] for n in positions]


def test_seed_and_pass_decide_which_rows_are_modified_and_another_modifier_does_not():
    assert modified(EVERY, PAIRS) == modified(EVERY, PAIRS)
    assert modified(EVERY, PAIRS, seed=2) != modified(EVERY, PAIRS) != modified(EVERY, PAIRS, pass_number=1)
    alone = modified({"upper_case": 0.3}, PAIRS)
    both = modified({"upper_case": 0.3, "noise": 0.3}, PAIRS)
    assert [pair[1] for pair in alone] == [pair[1] for pair in both]


def test_a_tokenizer_keeps_inline_tags_only_where_they_are_trained_on():
    assert inline_tags(DataConfig(modifiers={"tags": 0.1})) == INLINE_TAGS
    assert inline_tags(DataConfig(modifiers={"tags": 0.0, "noise": 1})) == []
