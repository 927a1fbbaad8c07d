"""Generator of the embedded demonstration corpus: the files in dist_transformer/data/sources/demo are its output.

A split has the sentences whose German is in its share of a hash, for every seed, so no sentence of validation or test is
in training, in words or in digits. Whoever changes a template writes the files anew and increments DEMO_VERSION:

    python tests/helpers/demo_generator.py
"""

import bz2
import hashlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_language import (
    ENGLISH_MONTHS,
    GERMAN_MONTHS,
    LARGEST_NUMBER,
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

from dist_transformer.data.sources import demo_corpus
from dist_transformer.data.sources.demo_corpus import PAIRS_OF_SPLIT, DemoSplit

HASH_SHARE_OF_SPLIT: dict[DemoSplit, range] = {"validation": range(0, 3), "test": range(3, 9), "train": range(9, 100)}
"""Percentage of the German sentences that each split draws from."""
DIGITS_SHARE = 0.25
"""Share of the numbers, years and prices that the English side writes in digits."""


@dataclass(frozen=True)
class Noun:
    """A German noun in the forms that the templates use; printed by itself it has no article."""

    article: str
    word: str

    def __str__(self) -> str:
        return self.word

    @property
    def the(self) -> str:
        """Nominative: `der Zug`."""
        return f"{self.article} {self.word}"

    @property
    def The(self) -> str:
        """Nominative at the start of a sentence: `Der Zug`."""
        return f"{self.article.capitalize()} {self.word}"

    @property
    def the_accusative(self) -> str:
        """Accusative: `den Zug`; neuter and feminine do not change."""
        return f"{'den' if self.article == 'der' else self.article} {self.word}"

    @property
    def In_the(self) -> str:
        """Dative with "in" at the start of a sentence: `Im Bahnhof`, `In der Bank`."""
        return f"{'In der' if self.article == 'die' else 'Im'} {self.word}"


@dataclass(frozen=True)
class Inflected:
    """A German date or price: nominative when printed by itself; `other` is dative (dates) or accusative (prices)."""

    nominative: str
    other: str

    def __str__(self) -> str:
        return self.nominative


@dataclass(frozen=True)
class Slot:
    """Text that replaces a `{name}` of a template on each side."""

    english: str
    german: str | Noun | Inflected


TEMPLATES: tuple[tuple[int, str, str], ...] = (
    # weight, English, German; a digit after a slot's name marks a second slot of the same kind
    (6, "{number}", "{number}"),
    (3, "{date}", "der {date}"),
    (3, "{full_date}", "der {full_date}"),
    (2, "{time}", "{time}"),
    (2, "{price}", "{price}"),
    (3, "It is {time}.", "Es ist {time}."),
    (4, "The {vehicle} leaves at {time} on {day}.", "{vehicle.The} fährt am {day} um {time} ab."),
    (4, "The {vehicle} to {city} leaves at {time}.", "{vehicle.The} nach {city} fährt um {time} ab."),
    (
        4,
        "The {vehicle} from {city} arrives at {time} on {day}.",
        "{vehicle.The} aus {city} kommt am {day} um {time} an.",
    ),
    (2, "On {day} the {vehicle} arrives at {time}.", "Am {day} kommt {vehicle.the} um {time} an."),
    (3, "The {event} begins at {time} on {day}.", "{event.The} beginnt am {day} um {time}."),
    (3, "The {event} takes place on {date}.", "{event.The} findet am {date.other} statt."),
    (2, "The {place} closes at {time} on {day}.", "{place.The} schließt am {day} um {time}."),
    (3, "The {place} is open from {time} to {time2}.", "{place.The} ist von {time} bis {time2} geöffnet."),
    (2, "The {place} has been open since {full_date}.", "{place.The} ist seit dem {full_date.other} geöffnet."),
    (3, "The {place} was built in {year}.", "{place.The} wurde im Jahr {year} gebaut."),
    (3, "Today is {day}, {date}.", "Heute ist {day}, der {date}."),
    (2, "{person} was here on {day}, {date}.", "{person} war am {day}, dem {date.other}, hier."),
    (4, "{person} was born on {full_date}.", "{person} wurde am {full_date.other} geboren."),
    (3, "{person} is {few} years old.", "{person} ist {few} Jahre alt."),
    (2, "{person} called me at {time} on {day}.", "{person} hat mich am {day} um {time} angerufen."),
    (4, "The {item} costs {price}.", "{item.The} kostet {price.other}."),
    (4, "{person} paid {price} for the {item}.", "{person} hat {price.other} für {item.the_accusative} bezahlt."),
    (2, "On {day} the {item} costs only {price}.", "Am {day} kostet {item.the} nur {price.other}."),
    (3, "The town has {large_count} inhabitants.", "Die Stadt hat {large_count} Einwohner."),
    (3, "There are {count} books in the {place}.", "{place.In_the} gibt es {count} Bücher."),
    (3, "We have counted {count} {things}.", "Wir haben {count} {things} gezählt."),
    (3, "We need {few} {things} and {few2} {things2}.", "Wir brauchen {few} {things} und {few2} {things2}."),
    (3, "From {city} to {city2} it is {count} kilometres.", "Von {city} nach {city2} sind es {count} Kilometer."),
    (2, "Your room has the number {number}.", "Ihr Zimmer hat die Nummer {number}."),
    (2, "The answer is {number}, not {number2}.", "Die Antwort ist {number}, nicht {number2}."),
)

VEHICLES = {"train": "der Zug", "bus": "der Bus", "ship": "das Schiff", "tram": "die Straßenbahn", "ferry": "die Fähre"}
EVENTS = {
    "meeting": "die Besprechung",
    "concert": "das Konzert",
    "film": "der Film",
    "lecture": "die Vorlesung",
    "game": "das Spiel",
    "course": "der Kurs",
}
PLACES = {
    "library": "die Bibliothek",
    "museum": "das Museum",
    "station": "der Bahnhof",
    "school": "die Schule",
    "theatre": "das Theater",
    "town hall": "das Rathaus",
    "bank": "die Bank",
}
ITEMS = {
    "book": "das Buch",
    "ticket": "die Fahrkarte",
    "umbrella": "der Regenschirm",
    "bread": "das Brot",
    "newspaper": "die Zeitung",
    "cake": "der Kuchen",
    "lamp": "die Lampe",
    "shirt": "das Hemd",
    "coat": "der Mantel",
    "bag": "die Tasche",
}
PEOPLE = {
    "My sister": "Meine Schwester",
    "My brother": "Mein Bruder",
    "Our teacher": "Unser Lehrer",
    "Her mother": "Ihre Mutter",
    "His grandfather": "Sein Großvater",
    "Anna": "Anna",
    "Peter": "Peter",
    "The doctor": "Der Arzt",
}
THINGS = {
    "chairs": "Stühle",
    "tables": "Tische",
    "bottles": "Flaschen",
    "trees": "Bäume",
    "birds": "Vögel",
    "windows": "Fenster",
    "cars": "Autos",
    "letters": "Briefe",
}
CITIES = {
    "Berlin": "Berlin",
    "Hamburg": "Hamburg",
    "Munich": "München",
    "Cologne": "Köln",
    "Vienna": "Wien",
    "Zurich": "Zürich",
    "Hanover": "Hannover",
    "Bonn": "Bonn",
}
DAYS = {
    "Monday": "Montag",
    "Tuesday": "Dienstag",
    "Wednesday": "Mittwoch",
    "Thursday": "Donnerstag",
    "Friday": "Freitag",
    "Saturday": "Samstag",
    "Sunday": "Sonntag",
}
DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def generated_pairs(split: DemoSplit, seed: int = 1) -> Iterator[tuple[str, str]]:
    """Yields the (English, German) pairs of a split, in an order that depends only on `seed`; each source once."""
    generator = random.Random(f"{seed}/{split}")
    weights = [weight for weight, _, _ in TEMPLATES]
    seen: set[str] = set()
    while len(seen) < PAIRS_OF_SPLIT[split]:
        _, english, german = generator.choices(TEMPLATES, weights)[0]
        source, target = _fill(english, german, generator)
        if source not in seen and _hash_percent(target) in HASH_SHARE_OF_SPLIT[split]:
            seen.add(source)
            yield source, target


def _fill(english: str, german: str, generator: random.Random) -> tuple[str, str]:
    slots: dict[str, Slot] = {}
    for name in re.findall(r"\{(\w+)\}", english):
        draw = SLOT_KINDS[name.rstrip("2")]
        slots[name] = draw(generator)
        while name.endswith("2") and slots[name].english == slots[name[:-1]].english:
            slots[name] = draw(generator)
    source = english.format(**{name: slot.english for name, slot in slots.items()})
    return source, german.format(**{name: slot.german for name, slot in slots.items()})


def _hash_percent(sentence: str) -> int:
    return int.from_bytes(hashlib.sha256(sentence.encode()).digest()[:8], "big") % 100


def _number(generator: random.Random) -> Slot:
    return _rendered(_random_number(generator, LARGEST_NUMBER), generator)


def _counted(largest: int) -> Callable[[random.Random], Slot]:
    """Returns a draw of counts from 2 on; never ..01, where German inflects the one (`einhundertein Bücher`)."""

    def draw(generator: random.Random) -> Slot:
        number = 0
        while number == 0 or number % 100 == 1:
            number = _random_number(generator, largest)
        return _rendered(number, generator)

    return draw


def _rendered(number: int, generator: random.Random) -> Slot:
    """Renders a number, in digits only below 10,000: longer ones would be cut into pieces in too many ways."""
    digits = number < 10_000 and generator.random() < DIGITS_SHARE
    return Slot(str(number) if digits else english_number(number), german_number(number))


def _random_number(generator: random.Random, largest: int) -> int:
    """Draws small numbers more often than large ones."""
    (limit,) = generator.choices((100, 1_000, 10_000, LARGEST_NUMBER + 1), (40, 30, 25, 5))
    return generator.randrange(min(limit, largest + 1))


def _year(generator: random.Random) -> Slot:
    year = generator.randint(1700, 2049)
    english = str(year) if generator.random() < DIGITS_SHARE else english_year(year)
    return Slot(english, german_year(year))


def _date(generator: random.Random) -> Slot:
    month = generator.randrange(12)
    day = generator.randint(1, DAYS_OF_MONTH[month])
    english = f"the {english_ordinal(day)} of {ENGLISH_MONTHS[month]}"
    nominative = f"{german_ordinal(day)} {GERMAN_MONTHS[month]}"
    return Slot(english, Inflected(nominative, f"{german_ordinal(day)}n {GERMAN_MONTHS[month]}"))


def _full_date(generator: random.Random) -> Slot:
    date, year = _date(generator), _year(generator)
    german = date.german
    assert isinstance(german, Inflected)
    with_year = Inflected(f"{german.nominative} {year.german}", f"{german.other} {year.german}")
    return Slot(f"{date.english} {year.english}", with_year)


def _time(generator: random.Random) -> Slot:
    if generator.random() < DIGITS_SHARE:
        return Slot(*digital_time(generator.randrange(24), generator.randrange(60)))
    return Slot(*clock_phrase(generator.randint(1, 12), generator.choice((0, 5, 10, 15, 20, 30, 40, 45, 50, 55))))


def _price(generator: random.Random) -> Slot:
    euros = generator.choice((generator.randrange(100), generator.randrange(1000)))
    cents = generator.choice((0, 5 * generator.randrange(20), generator.randrange(100)))
    if euros + cents == 0 or (euros > 1 and euros % 100 == 1):
        return _price(generator)
    digits = euros > 0 and generator.random() < DIGITS_SHARE
    english = f"€{euros}{f'.{cents:02d}' if cents else ''}" if digits else english_price(euros, cents)
    return Slot(english, Inflected(german_price(euros, cents, "ein"), german_price(euros, cents, "einen")))


def _word(table: dict[str, str]) -> Callable[[random.Random], Slot]:
    entries = [Slot(english, german) for english, german in table.items()]
    return lambda generator: generator.choice(entries)


def _noun(table: dict[str, str]) -> Callable[[random.Random], Slot]:
    entries = [Slot(english, Noun(*german.split(" ", 1))) for english, german in table.items()]
    return lambda generator: generator.choice(entries)


SLOT_KINDS: dict[str, Callable[[random.Random], Slot]] = {
    "number": _number,
    "count": _counted(9_999),
    "large_count": _counted(LARGEST_NUMBER),
    "few": _counted(99),
    "year": _year,
    "date": _date,
    "full_date": _full_date,
    "time": _time,
    "price": _price,
    "vehicle": _noun(VEHICLES),
    "event": _noun(EVENTS),
    "place": _noun(PLACES),
    "item": _noun(ITEMS),
    "person": _word(PEOPLE),
    "things": _word(THINGS),
    "city": _word(CITIES),
    "day": _word(DAYS),
}

if __name__ == "__main__":
    for split in PAIRS_OF_SPLIT:
        for code, side in zip(("en", "de"), zip(*generated_pairs(split), strict=True), strict=True):
            file = Path(demo_corpus.__file__).with_name("demo") / f"{split}.{code}.bz2"
            file.write_bytes(bz2.compress("".join(f"{sentence}\n" for sentence in side).encode()))
