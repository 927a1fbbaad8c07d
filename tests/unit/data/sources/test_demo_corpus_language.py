"""Words for numbers, times and dates, against parsers written the other way round and against well-known forms."""

import random
import re

import pytest
from demo_language import (
    clock_phrase,
    digital_time,
    english_number,
    english_ordinal,
    english_price,
    english_year,
    german_number,
    german_ordinal,
    german_price,
    german_year,
)

SAMPLE = [*range(2000), *random.Random(0).sample(range(2000, 1_000_000), 3000), 999_999]

GERMAN_VALUES = {
    **dict(null=0, ein=1, eins=1, zwei=2, drei=3, vier=4, fünf=5, sechs=6, sieben=7, acht=8, neun=9, zehn=10, elf=11),
    **dict(zwölf=12, dreizehn=13, vierzehn=14, fünfzehn=15, sechzehn=16, siebzehn=17, achtzehn=18, neunzehn=19),
    **dict(zwanzig=20, dreißig=30, vierzig=40, fünfzig=50, sechzig=60, siebzig=70, achtzig=80, neunzig=90),
}
ENGLISH_VALUES = {
    **dict(zero=0, one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, eleven=11),
    **dict(twelve=12, thirteen=13, fourteen=14, fifteen=15, sixteen=16, seventeen=17, eighteen=18, nineteen=19),
    **dict(twenty=20, thirty=30, forty=40, fifty=50, sixty=60, seventy=70, eighty=80, ninety=90),
}


def parse_german(word: str) -> int:
    if match := re.fullmatch(r"(.+)tausend(.*)", word):
        return 1000 * parse_german(match[1]) + (parse_german(match[2]) if match[2] else 0)
    if match := re.fullmatch(r"(.+)hundert(.*)", word):
        return 100 * GERMAN_VALUES[match[1]] + (parse_german(match[2]) if match[2] else 0)
    if match := re.fullmatch(r"(.+)und(.+zig|dreißig)", word):
        return GERMAN_VALUES[match[1]] + GERMAN_VALUES[match[2]]
    return GERMAN_VALUES[word]


def parse_english(words: str) -> int:
    total, below_thousand = 0, 0
    for word in words.replace("-", " ").replace(" and ", " ").split():
        if word == "thousand":
            total, below_thousand = below_thousand * 1000, 0
        elif word == "hundred":
            below_thousand *= 100
        else:
            below_thousand += ENGLISH_VALUES[word]
    return total + below_thousand


def test_german_numbers_are_parsed_back_to_themselves():
    assert [parse_german(german_number(number)) for number in SAMPLE] == SAMPLE


def test_english_numbers_are_parsed_back_to_themselves():
    assert [parse_english(english_number(number)) for number in SAMPLE] == SAMPLE


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (66, "sixty-six", "sechsundsechzig"),
        (77, "seventy-seven", "siebenundsiebzig"),
        (101, "one hundred and one", "einhunderteins"),
        (121, "one hundred and twenty-one", "einhunderteinundzwanzig"),
        (1200, "one thousand two hundred", "eintausendzweihundert"),
        (1001, "one thousand and one", "eintausendeins"),
        (21_000, "twenty-one thousand", "einundzwanzigtausend"),
        (
            201_345,
            "two hundred and one thousand three hundred and forty-five",
            "zweihunderteintausenddreihundertfünfundvierzig",
        ),
    ],
)
def test_well_known_numbers_have_their_well_known_words(number: int, english: str, german: str):
    assert (english_number(number), german_number(number)) == (english, german)


@pytest.mark.parametrize(
    ("day", "english", "german"),
    [
        (1, "first", "erste"),
        (2, "second", "zweite"),
        (3, "third", "dritte"),
        (7, "seventh", "siebte"),
        (8, "eighth", "achte"),
        (12, "twelfth", "zwölfte"),
        (19, "nineteenth", "neunzehnte"),
        (20, "twentieth", "zwanzigste"),
        (21, "twenty-first", "einundzwanzigste"),
        (30, "thirtieth", "dreißigste"),
    ],
)
def test_ordinals_have_their_irregular_forms(day: int, english: str, german: str):
    assert (english_ordinal(day), german_ordinal(day)) == (english, german)


@pytest.mark.parametrize(
    ("year", "english", "german"),
    [
        (1984, "nineteen eighty-four", "neunzehnhundertvierundachtzig"),
        (1905, "nineteen oh five", "neunzehnhundertfünf"),
        (1900, "nineteen hundred", "neunzehnhundert"),
        (2000, "two thousand", "zweitausend"),
        (2005, "two thousand and five", "zweitausendfünf"),
        (2026, "twenty twenty-six", "zweitausendsechsundzwanzig"),
    ],
)
def test_years_are_read_in_hundreds_before_two_thousand(year: int, english: str, german: str):
    assert (english_year(year), german_year(year)) == (english, german)


@pytest.mark.parametrize(
    ("hour", "minute", "english", "german"),
    [
        (7, 0, "seven o'clock", "sieben Uhr"),
        (1, 0, "one o'clock", "ein Uhr"),
        (7, 30, "half past seven", "halb acht"),
        (12, 30, "half past twelve", "halb eins"),
        (8, 45, "a quarter to nine", "Viertel vor neun"),
        (12, 45, "a quarter to one", "Viertel vor eins"),
        (1, 15, "a quarter past one", "Viertel nach eins"),
        (3, 10, "ten past three", "zehn nach drei"),
        (3, 40, "twenty to four", "zwanzig vor vier"),
    ],
)
def test_spoken_times_name_the_hour_that_each_language_names(hour: int, minute: int, english: str, german: str):
    assert clock_phrase(hour, minute) == (english, german)


def test_digital_times_are_read_hour_by_minute():
    assert digital_time(7, 30) == ("7:30", "sieben Uhr dreißig")
    assert digital_time(1, 5) == ("1:05", "ein Uhr fünf")
    assert digital_time(21, 1) == ("21:01", "einundzwanzig Uhr eins")
    assert digital_time(0, 0) == ("0:00", "null Uhr")


def test_prices_leave_out_what_is_zero_and_inflect_a_single_one():
    assert (english_price(4, 50), german_price(4, 50, "ein")) == (
        "four euros and fifty cents",
        "vier Euro und fünfzig Cent",
    )
    assert (english_price(1, 1), german_price(1, 1, "einen")) == ("one euro and one cent", "einen Euro und einen Cent")
    assert (english_price(0, 20), german_price(0, 20, "ein")) == ("twenty cents", "zwanzig Cent")
    assert (english_price(21, 0), german_price(21, 0, "ein")) == ("twenty-one euros", "einundzwanzig Euro")
