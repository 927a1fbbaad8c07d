"""State that the processes of a preparation share: results of the first process for all, and counts of each chunk."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dist_transformer.data.manifest import Shard, Split, TextColumns, TokenizerFiles
from dist_transformer.data.sources.retries import reason_of
from dist_transformer.errors import DataError
from dist_transformer.files import read_json_patiently, write_json

STATE_NAME = "state.json"
EXAMPLES, EXAMPLE_CHARACTERS = 3, 200
"""Dropped pairs of each rule and corpus that the report shows, and the most characters of a sentence."""


@dataclass(frozen=True)
class Chunk:
    """Counts of one range of rows that were read.

    Attributes:
        dropped: number of rows by rule.
        source_lengths: numbers of kept rows with 0, 1, 2 ... tokens, as target_lengths; empty if they were not tokenized.
        repaired: number of rows whose markup was repaired.
        examples: the first dropped pairs of each rule.
        unknown: number of source and target tokens that no piece of the vocabulary stands for.
    """

    read_rows: int
    rows: int
    dropped: dict[str, int]
    source_lengths: tuple[int, ...]
    target_lengths: tuple[int, ...]
    repaired: int = 0
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    unknown: tuple[int, ...] = (0, 0)

    @staticmethod
    def together(chunks: Sequence["Chunk"]) -> "Chunk":
        """Returns the sum of chunks."""
        dropped = sum((Counter(chunk.dropped) for chunk in chunks), Counter[str]())
        return Chunk(
            read_rows=sum(chunk.read_rows for chunk in chunks),
            rows=sum(chunk.rows for chunk in chunks),
            dropped=dict(sorted(dropped.items())),
            source_lengths=_added([chunk.source_lengths for chunk in chunks]),
            target_lengths=_added([chunk.target_lengths for chunk in chunks]),
            repaired=sum(chunk.repaired for chunk in chunks),
            examples={
                rule: [pair for chunk in chunks for pair in chunk.examples.get(rule, ())][:EXAMPLES] for rule in dropped
            },
            unknown=_added([chunk.unknown for chunk in chunks]),
        )


def num_tokens(lengths: Sequence[int]) -> int:
    """Returns the total of tokens, from the number of rows of each length."""
    return sum(length * rows for length, rows in enumerate(lengths))


def token_split(chunk: Chunk, shards: tuple[Shard, ...]) -> Split:
    """Returns the split of all chunks `together`, in shards of token ids."""
    source, target = chunk.source_lengths, chunk.target_lengths
    longest = len(source) - 1, len(target) - 1
    return Split(shards, chunk.rows, num_tokens(source), num_tokens(target), *longest, chunk.read_rows, chunk.dropped)


def text_split(
    shards: tuple[Shard, ...], read_rows: int, dropped: dict[str, int], max_tokens: int, text: TextColumns
) -> Split:
    """Returns a split of text. Its tokens are the estimates of its row groups; no side is longer than `max_tokens`."""
    groups = (group for shard in shards for group in shard.row_groups)
    rows, source_tokens, target_tokens = map(sum, zip((0, 0, 0), *groups, strict=True))
    return Split(shards, rows, source_tokens, target_tokens, max_tokens, max_tokens, read_rows, dropped, text)


@dataclass
class PrepareState:
    """Content of `work/state.json`.

    Attributes:
        rows_total: rows of each corpus as counted by the first scan of the text; None if unknown.
        samples: counts of the first rows of the corpora that are tokenized on the fly.
        in_place: the splits of corpora that are read in place, without shards of their own.
        commits: the commits of Hub datasets at the start (`hub_commits`), which every process reads.
    """

    recipe: dict[str, Any]
    scanned: bool = False
    rows_total: dict[str, int | None] = field(default_factory=dict)
    tokenizer: TokenizerFiles | None = None
    samples: dict[str, Chunk] = field(default_factory=dict)
    in_place: dict[str, Split] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def load(work: Path) -> "PrepareState | None":
        """Reads the state; None if no preparation was begun, DataError if the file is not valid."""
        path = work / STATE_NAME
        if not path.exists():
            return None
        try:
            return STATE.validate_python(read_json_patiently(path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be read ({reason_of(error)}). Delete {work.parent} and prepare again."
            ) from error

    def save(self, work: Path) -> None:
        write_json(work / STATE_NAME, STATE.dump_python(self))


CHUNK, STATE = TypeAdapter(Chunk), TypeAdapter(PrepareState)


def _added(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Adds sequences of any lengths, element by element."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
