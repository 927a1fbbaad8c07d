"""Reader interface of all formats: sentence pairs of a file, some at a time."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dist_transformer.data.sources.text import Texts

Raw = TypeVar("Raw")


@dataclass
class Pairs:
    """Consecutive pairs; `bad_encoding` are the positions of those that are not valid UTF-8."""

    source: Texts
    target: Texts
    bad_encoding: set[int]


class Reader(Protocol):
    """Reads one file in order."""

    def has_more(self) -> bool: ...

    def take(self, rows: int) -> Pairs:
        """Returns the next pairs, up to this many."""
        ...

    def skip(self, rows: int) -> int:
        """Skips up to this many rows as cheaply as the format allows; returns the number of skipped rows."""
        ...


class PairReader(Generic[Raw]):
    """A `Reader` of lines, or of other items, one for each pair, that are cheap to read and are parsed only when they are
    wanted. `parse` is given the number of the first item, counted from 0, and the items."""

    def __init__(self, raw: Iterator[Raw], parse: Callable[[int, list[Raw]], Pairs]) -> None:
        self._raw, self._parse = raw, parse
        self._ahead: list[Raw] = []
        self._number = 0

    def has_more(self) -> bool:
        if not self._ahead:
            self._ahead = list(itertools.islice(self._raw, 1))
        return bool(self._ahead)

    def take(self, rows: int) -> Pairs:
        batch = list(self._next(rows))
        pairs = self._parse(self._number, batch)
        self._number += len(batch)
        return pairs

    def skip(self, rows: int) -> int:
        skipped = sum(1 for _ in self._next(rows))
        self._number += skipped
        return skipped

    def _next(self, rows: int) -> Iterator[Raw]:
        ahead, self._ahead = self._ahead, []
        return itertools.islice(itertools.chain(ahead, self._raw), rows)


class ReaderChain:
    """A `Reader` of several files, one after the other; each is opened when it is reached."""

    def __init__(self, readers: Iterable[Reader]) -> None:
        self._readers = iter(readers)
        self._reader: Reader | None = next(self._readers, None)

    def has_more(self) -> bool:
        while self._reader is not None and not self._reader.has_more():
            self._reader = next(self._readers, None)
        return self._reader is not None

    def take(self, rows: int) -> Pairs:
        taken = Pairs([], [], set())
        while (before := len(taken.source)) < rows and self.has_more():
            assert self._reader is not None
            pairs = self._reader.take(rows - before)
            taken.source += pairs.source
            taken.target += pairs.target
            taken.bad_encoding |= {before + position for position in pairs.bad_encoding}
        return taken

    def skip(self, rows: int) -> int:
        skipped = 0
        while skipped < rows and self.has_more():
            assert self._reader is not None
            skipped += self._reader.skip(rows - skipped)
        return skipped
