"""English and German words for numbers, dates, times of day and prices, as the demonstration corpus uses them.

German writes units before tens and everything below a million as one word: 4321 is
`viertausenddreihunderteinundzwanzig`. English follows British usage: `four thousand three hundred and twenty-one`.
"""

# fmt: off
ENGLISH_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
ENGLISH_TENS = ("", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ENGLISH_ORDINALS = {1: "first", 2: "second", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth", 12: "twelfth"}
GERMAN_UNITS = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)
GERMAN_TENS = ("", "zehn", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
GERMAN_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
ENGLISH_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)
GERMAN_MONTHS = (
    "Januar", "Februar", "März", "April", "Mai", "Juni",
    "Juli", "August", "September", "Oktober", "November", "Dezember",
)
# fmt: on
LARGEST_NUMBER = 999_999


def english_number(number: int) -> str:
    """Returns 0 to 999,999 in words: 105 -> `one hundred and five`."""
    thousands, rest = divmod(number, 1000)
    if thousands == 0:
        return _english_below_thousand(rest)
    head = f"{_english_below_thousand(thousands)} thousand"
    if rest == 0:
        return head
    return f"{head} {'and ' if rest < 100 else ''}{_english_below_thousand(rest)}"


def german_number(number: int) -> str:
    """Returns 0 to 999,999 as one word, in the form for counting: 1 -> `eins`, 1001 -> `eintausendeins`."""
    thousands, rest = divmod(number, 1000)
    if thousands == 0:
        return _german_below_thousand(rest)
    head = f"{_before_noun(_german_below_thousand(thousands))}tausend"
    return head if rest == 0 else head + _german_below_thousand(rest)


def english_ordinal(number: int) -> str:
    """Returns the ordinal of 1 to 31: `first`, `twenty-first`, `thirtieth`."""
    tens, unit = divmod(number, 10)
    if number > 20 and unit:
        return f"{ENGLISH_TENS[tens]}-{english_ordinal(unit)}"
    if number in ENGLISH_ORDINALS:
        return ENGLISH_ORDINALS[number]
    word = english_number(number)
    return (word[:-1] + "ie" if word.endswith("y") else word) + "th"


def german_ordinal(number: int) -> str:
    """Returns the ordinal of 1 to 31 after `der`: `erste`, `einundzwanzigste`; after `am` and `dem` append n."""
    return GERMAN_ORDINALS.get(number, german_number(number) + ("te" if number < 20 else "ste"))


def english_year(year: int) -> str:
    """Spells 1100 to 2099: `nineteen eighty-four`, `nineteen oh five`, `nineteen hundred`, `two thousand and five`."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return english_number(year)
    if rest == 0:
        return f"{english_number(century)} hundred"
    return f"{english_number(century)} {'oh ' if rest < 10 else ''}{english_number(rest)}"


def german_year(year: int) -> str:
    """Spells 1100 to 2099: `neunzehnhundertvierundachtzig`, `zweitausendfünf`."""
    if year >= 2000:
        return german_number(year)
    century, rest = divmod(year, 100)
    return f"{german_number(century)}hundert{german_number(rest) if rest else ''}"


def clock_phrase(hour: int, minute: int) -> tuple[str, str]:
    """Spells a time of the twelve-hour clock, minute a multiple of 5: (7, 30) -> `half past seven`, `halb acht`.

    25 and 35 minutes have no form here: German refers to the half hour (`fünf vor halb acht`), English does not.
    """
    next_hour = hour % 12 + 1
    if minute == 0:
        return f"{english_number(hour)} o'clock", f"{_before_noun(german_number(hour))} Uhr"
    if minute == 30:
        return f"half past {english_number(hour)}", f"halb {german_number(next_hour)}"
    past, distance = minute < 30, min(minute, 60 - minute)
    english_distance = "a quarter" if distance == 15 else english_number(distance)
    german_distance = "Viertel" if distance == 15 else german_number(distance)
    shown = hour if past else next_hour
    return (
        f"{english_distance} {'past' if past else 'to'} {english_number(shown)}",
        f"{german_distance} {'nach' if past else 'vor'} {german_number(shown)}",
    )


def digital_time(hour: int, minute: int) -> tuple[str, str]:
    """Returns a time of the twenty-four-hour clock: (13, 45) -> `13:45`, `dreizehn Uhr fünfundvierzig`."""
    german = f"{_before_noun(german_number(hour))} Uhr"
    return f"{hour}:{minute:02d}", german if minute == 0 else f"{german} {german_number(minute)}"


def english_price(euros: int, cents: int) -> str:
    """Returns `four euros and fifty cents`, `one euro`, `fifty cents`; not both are 0."""
    parts = [
        f"{english_number(n)} {unit}{'' if n == 1 else 's'}" for n, unit in ((euros, "euro"), (cents, "cent")) if n
    ]
    return " and ".join(parts)


def german_price(euros: int, cents: int, one: str) -> str:
    """Returns `vier Euro und fünfzig Cent`; `one` is the word for 1: `ein` (nominative) or `einen` (accusative)."""
    amounts = [(euros, "Euro"), (cents, "Cent")]
    return " und ".join(f"{one if n == 1 else german_number(n)} {unit}" for n, unit in amounts if n)


def _english_below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds == 0:
        return _english_below_hundred(rest)
    head = f"{ENGLISH_UNITS[hundreds]} hundred"
    return head if rest == 0 else f"{head} and {_english_below_hundred(rest)}"


def _english_below_hundred(number: int) -> str:
    tens, unit = divmod(number, 10)
    if number < 20:
        return ENGLISH_UNITS[number]
    return ENGLISH_TENS[tens] if unit == 0 else f"{ENGLISH_TENS[tens]}-{ENGLISH_UNITS[unit]}"


def _german_below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds == 0:
        return _german_below_hundred(rest)
    head = f"{_before_noun(GERMAN_UNITS[hundreds])}hundert"
    return head if rest == 0 else head + _german_below_hundred(rest)


def _german_below_hundred(number: int) -> str:
    tens, unit = divmod(number, 10)
    if number < 20:
        return GERMAN_UNITS[number]
    return GERMAN_TENS[tens] if unit == 0 else f"{_before_noun(GERMAN_UNITS[unit])}und{GERMAN_TENS[tens]}"


def _before_noun(word: str) -> str:
    """Removes the s of `eins` before the counted noun: `ein Uhr`, `einundzwanzig`, `einhundert`."""
    return word[:-1] if word.endswith("eins") else word
