"""Modifiers: changes of pairs in training, so that a model also translates other case, typos, noise and inline tags.

docs/data.md says what each does, and on what it depends. A modifier takes (source, target, draw), where draw gives numbers
in [0, 1), and returns both sides; markup, such as <b>, it leaves as it is.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from random import Random
from typing import Any

import numpy as np

from dist_transformer.config.data_schema import MODIFIERS, DataConfig
from dist_transformer.data.loader.window_request import PURPOSE_MODIFIERS, RowSlice, random_generator

Draw = Callable[[], float]

NUMBERS_OF_A_ROW = 8
"""Random numbers for each row: whether each modifier changes it, in the order of MODIFIERS, and last the seed of how."""
FINAL_PUNCTUATION = ".!?…。！？｡।؟۔"  # noqa: RUF001  (full stops)
SYMBOLS = "#$%&*+/=@\\^_`{|}~\N{REPLACEMENT CHARACTER}Ãâ€"
"""Characters of noise; the last ones are from text that was decoded wrongly."""
TYPO_SHARE = 0.2
"""Share of the words with a typo in a sentence with typos."""
NUM_TAGS = 3
INLINE_TAGS = [f"<{slash}{number}>" for number in range(1, NUM_TAGS + 1) for slash in ("", "/")]

_MARKUP = re.compile(r"(<[^<>\s]+>)")
_titled = partial(re.compile(r"(?<![\w'’])[^\W\d_]").sub, lambda letter: letter[0].title())  # noqa: RUF001  (apostrophes)
_LONG_WORD = re.compile(r"<[^<>\s]+>|[^\W\d_]{4,}")
_WORD = re.compile(r"<[^<>\s]+>|[^\W_]+(?:[.,:'’-][^\W_]+)*")  # noqa: RUF001


@dataclass(frozen=True)
class Modifiers:
    """Shares of the rows by modifier, the seed of a run, and the tags at the head of each source, which stay as they are."""

    shares: Mapping[str, float]
    seed: int
    prefix: str = ""

    def modify(self, piece: RowSlice, positions: Sequence[int], source: list[str], target: list[str]) -> None:
        """Changes in place some of these pairs, which stand at `positions` of a slice."""
        if not any(self.shares.values()):
            return
        index = (piece.corpus, piece.row_group, piece.pass_number)
        bits: Any = random_generator(self.seed, PURPOSE_MODIFIERS, *index).bit_generator  # PCG64, which can advance
        bits.advance(piece.first * NUMBERS_OF_A_ROW)
        drawn = bits.random_raw((piece.last - piece.first) * NUMBERS_OF_A_ROW).reshape(-1, NUMBERS_OF_A_ROW)[positions]
        shares = [self.shares.get(name, 0.0) for name in MODIFIERS]
        is_due = (drawn[:, : len(shares)] >> np.uint64(11)) * 2.0**-53 < shares
        for row in np.flatnonzero(is_due.any(axis=1)).tolist():
            draw, text = Random(int(drawn[row, -1])).random, source[row].removeprefix(self.prefix)
            prefix = source[row].removesuffix(text)
            if text.strip():
                for change in compress(_CHANGES, is_due[row]):
                    text, target[row] = change(text, target[row], draw)
                source[row] = prefix + text


def inline_tags(data: DataConfig) -> list[str]:
    """Returns the tags that the modifier of that name puts into text, each of which a tokenizer keeps as one piece."""
    return INLINE_TAGS if data.modifiers.get("tags") else []


def _no_final_punctuation(source: str, target: str, draw: Draw) -> tuple[str, str]:
    """Removes the last punctuation of both sides, if both have some, and something before it."""
    bare = [side.rstrip().rstrip(FINAL_PUNCTUATION).rstrip() for side in (source, target)]
    is_due = all(bare) and bare[0] != source.rstrip() and bare[1] != target.rstrip()
    return (bare[0], bare[1]) if is_due else (source, target)


def _cased(change: Callable[[str], str], source: str, target: str, draw: Draw) -> tuple[str, str]:
    return _outside_markup(source, change), _outside_markup(target, change)


def _tags(source: str, target: str, draw: Draw) -> tuple[str, str]:
    """Puts tags around names and numbers that both sides have; without any, around both sentences, or at one end."""
    places = _names(source), _names(target)
    names = [name for name in places[0] if name in places[1]]
    chosen = [name for name in names if draw() < 0.5][:NUM_TAGS] or names[:1]
    if chosen:
        return _with_tags(source, places[0], chosen), _with_tags(target, places[1], chosen)
    before, after = (("<1>", "</1>"), ("<1></1>", ""), ("", "<1></1>"))[int(3 * draw())]
    return before + source + after, before + target + after


def _typos(source: str, target: str, draw: Draw) -> tuple[str, str]:
    """Mistypes some words of the source of four letters or more, one at least."""
    words = list(_words(_LONG_WORD, source))
    chosen = [word for word in words if draw() < TYPO_SHARE] or words[int(draw() * len(words)) :][:1]
    for word in reversed(chosen):  # from the end, so that places before it stay
        source = source[: word.start()] + _mistyped(word[0], draw) + source[word.end() :]
    return source, target


def _noise(source: str, target: str, draw: Draw) -> tuple[str, str]:
    """Puts one to three groups of one to four symbols between the words of the source."""
    words = source.split(" ")
    for _ in range(1 + int(3 * draw())):
        symbols = [SYMBOLS[int(draw() * len(SYMBOLS))] for _ in range(1 + int(4 * draw()))]
        words.insert(int(draw() * (len(words) + 1)), "".join(symbols))
    return " ".join(words), target


_CHANGES: list[Callable[[str, str, Draw], tuple[str, str]]] = [
    _no_final_punctuation,
    partial(_cased, str.upper),
    partial(_cased, _titled),
    _tags,
    _typos,
    _noise,
]
"""In the order of MODIFIERS."""


def _outside_markup(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if number % 2 else change(part) for number, part in enumerate(_MARKUP.split(text)))


def _words(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return (found for found in pattern.finditer(text) if found[0][0] != "<")


def _mistyped(word: str, draw: Draw) -> str:
    """Swaps, drops, doubles or replaces a letter of a word, not its first."""
    at = 1 + int(draw() * (len(word) - 2))
    here, following, other = word[at], word[at + 1], word[int(draw() * len(word))]
    typed = (following + here, following, here + here + following, other + following)[int(4 * draw())]
    return word[:at] + typed + word[at + 2 :]


def _names(text: str) -> dict[str, int]:
    """Returns the places of numbers, and of capitalised words but the first, that occur once in a text."""
    words = list(_words(_WORD, text))
    counts = Counter(word[0] for word in words)
    names = [w for n, w in enumerate(words) if re.search(r"\d", w[0]) or (n and w[0][0].isupper())]
    return {name[0]: name.start() for name in names if counts[name[0]] == 1}


def _with_tags(text: str, places: Mapping[str, int], names: Sequence[str]) -> str:
    """Puts the n-th pair of tags around the n-th name."""
    for name in sorted(names, key=lambda name: -places[name]):  # from the end, so that places before it stay
        first, number = places[name], names.index(name) + 1
        text = f"{text[:first]}<{number}>{name}</{number}>{text[first + len(name) :]}"
    return text
