"""Many sentences as one array of code points, for rules that look at every character: shares, repetitions, keys, MinHash.

The key of a sentence is a 64-bit hash of its letters, digits and symbols, case folded, and of where its words begin: the
same text has the same key everywhere, whatever its spaces and punctuation. At 10^9 different pairs about 27 share a key with
another one by chance (n^2 / 2^65). Classes up to SYMBOL make keys; if they or their order change, so must PREPARED_FORMAT.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Keys = NDArray[np.uint64]
LETTER, DIGIT, SYMBOL, PUNCTUATION, SPACE = range(5)
CLASSED = 0x20000
"""Code points with a class of their own; those above are ideographs."""
LONGEST_PIECE, LEAST_REPEATED = 16, 10
"""Longest piece whose repetitions are looked for, and the fewest characters that they must have together."""
SHINGLE, SIGNATURE = 4, 64
"""Characters that are hashed together, and hash functions of a signature: the error of a similarity of 0.8 is 0.05."""
_SPLITMIX = [np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


class Sentences:
    """Sentences as code points, each with a space behind it, so that none is empty."""

    def __init__(self, texts: Sequence[str]) -> None:
        folded = [f"{text.casefold()} " for text in texts]
        self._lengths = np.fromiter(map(len, folded), np.int64, len(folded))
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._codes = np.frombuffer("".join(folded).encode("utf-32-le", "surrogatepass"), "<u4")
        self._classes = _classes()[np.minimum(self._codes, CLASSED - 1)]

    def share(self, *kinds: int) -> NDArray[np.float64]:
        """Returns the share of some classes among the characters of each sentence that are no spaces."""
        return self.number(*kinds) / np.maximum(self.count(self._classes != SPACE), 1)

    def number(self, *kinds: int) -> NDArray[np.int64]:
        """Returns the number of characters of some classes in each sentence."""
        return self.count(np.isin(self._classes, kinds))

    def count(self, mask: Mask) -> NDArray[np.int64]:
        """Returns the number of characters of each sentence in a mask of all characters."""
        return np.add.reduceat(mask, self._starts, dtype=np.int64) if len(self._starts) else self._starts

    def repeats(self, times: int) -> Mask:
        """True for sentences with a piece that stands `times` times in a row; digits and spaces do not count."""
        found = np.zeros(len(self._starts), np.bool_)
        row, space = np.repeat(np.arange(len(found)), self._lengths), self._classes == SPACE
        counted = self._classes != DIGIT
        counted[1:] &= ~(space[1:] & space[:-1])
        for size in range(1, LONGEST_PIECE + 1):
            need = max((times - 1) * size, LEAST_REPEATED - size)
            same = (self._codes[size:] == self._codes[:-size]) & counted[size:]
            total = np.concatenate([[0], np.cumsum(same, dtype=np.int32)])
            begins = np.flatnonzero(total[need:] - total[:-need] == need)
            found[row[begins[row[begins] == row[begins + need + size - 1]]]] = True
        return found

    @cached_property
    def num_kept(self) -> NDArray[np.int64]:
        """Number of characters of each sentence that its key is made of."""
        return self.count(self._kept)

    @cached_property
    def keys(self) -> Keys:
        """Returns the key of each sentence."""
        place = np.arange(len(self._values)) - np.repeat(self._kept_starts, self.num_kept)
        powers = np.multiply.accumulate(np.full(int(self.num_kept.max(initial=1)), _SPLITMIX[0]))
        return _mixed(_reduced(np.add, self._values * powers[place], self.num_kept))

    def signatures(self, side: int) -> NDArray[np.uint32]:
        """Returns minimal hashes (sentences, SIGNATURE) of all runs of SHINGLE characters of each sentence, or of a shorter one.

        `side`: 0 or 1, so that runs of the source equal none of the target. The minimum of both sides is that of the pair.
        """
        grams = self._values + np.uint64(side)
        for distance in range(1, SHINGLE):
            grams[:-distance] = grams[:-distance] * _SPLITMIX[1] + self._values[distance:]
        ends = np.repeat(self._kept_starts + self.num_kept, self.num_kept)
        whole = _mixed(grams[np.arange(len(grams)) + SHINGLE <= ends]).astype(np.uint32)
        counts = np.maximum(self.num_kept - SHINGLE + 1, 0)
        short = _mixed(self.keys + np.uint64(side)).astype(np.uint32)
        draws = _mixed(np.arange(2 * SIGNATURE, dtype=np.uint64)).astype(np.uint32)
        columns = [
            np.where(counts > 0, _reduced(np.minimum, (whole ^ salt) * (odd | 1), counts), (short ^ salt) * odd)
            for salt, odd in zip(draws[::2], draws[1::2], strict=True)
        ]
        return np.stack(columns, axis=1)

    @cached_property
    def _kept(self) -> Mask:
        """Letters, digits and symbols; of a sentence without them everything but spaces."""
        words = self._classes <= SYMBOL
        bare = np.repeat(self.count(words) == 0, self._lengths)
        kept: Mask = words | (bare & (self._classes != SPACE))
        return kept

    @cached_property
    def _kept_starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.num_kept) - self.num_kept

    @cached_property
    def _values(self) -> Keys:
        """A hash of each kept character and of whether a word begins there."""
        begins = self._kept.copy()
        begins[1:] &= ~self._kept[:-1]
        return _mixed((self._codes.astype(np.uint64) * np.uint64(2) + begins)[self._kept])


def comparable(text: str) -> str:
    """Returns a text whose key is that of all texts that tokenizers read alike (NFKC), with or without soft hyphens."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text).replace("\u00ad", "")


def pair_keys(source: Sentences, target: Sentences) -> Keys:
    """Returns the key of each pair."""
    return _mixed(source.keys) ^ target.keys


def contained(keys: Keys, sorted_keys: Keys) -> Mask:
    """True for the keys that are among sorted ones."""
    if not len(sorted_keys):
        return np.zeros(len(keys), np.bool_)
    found: Mask = sorted_keys[np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)] == keys
    return found


def _mixed(values: Keys) -> Keys:
    """Hashes each number, by splitmix64."""
    values = values + _SPLITMIX[0]
    values = (values ^ (values >> np.uint64(30))) * _SPLITMIX[1]
    values = (values ^ (values >> np.uint64(27))) * _SPLITMIX[2]
    return values ^ (values >> np.uint64(31))


def _reduced(function: np.ufunc, values: NDArray, counts: NDArray[np.int64]) -> NDArray:  # type: ignore[type-arg]
    """Reduces the values of each sentence, of which it has `counts`; gives 0 for one that has none."""
    result = np.zeros(len(counts), values.dtype)
    if len(values):
        result[counts > 0] = function.reduceat(values, (np.cumsum(counts) - counts)[counts > 0])
    return result


@cache
def _classes() -> NDArray[np.uint8]:
    """Returns the class of each code point by the first letter of its Unicode category: marks are letters, % a symbol."""
    kinds = {"L": LETTER, "M": LETTER, "N": DIGIT, "S": SYMBOL, "Z": SPACE, "C": SPACE}
    classes = [
        SYMBOL if chr(code) in "%\u2030" else kinds.get(unicodedata.category(chr(code))[0], PUNCTUATION)
        for code in range(CLASSED)
    ]
    return np.array([*classes[:-1], LETTER], np.uint8)  # the last one stands for all above
