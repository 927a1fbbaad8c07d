"""Reader of tables with one row per line: jsonl, and csv, whose quoted cells may span lines.

Read line by line and not through Arrow's or pandas' readers, so that every cell stays text (`12`, `NA` and
`2020-01-01` too), messages name the line, and unwanted rows are skipped without being parsed.
"""

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dist_transformer.data.sources.lines import check_utf8, read_complete_lines, read_lines
from dist_transformer.data.sources.readers import PairReader, Pairs
from dist_transformer.errors import DataError

MOST_CHARACTERS_OF_A_CELL = 1 << 26
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ColumnNames = tuple[str, str]
ChooseColumns = Callable[[list[str], str], ColumnNames]
"""Takes the existing columns and the file's name for messages; returns the source and the target column."""


def csv_reader(file: str, choose: ChooseColumns, drop: bool) -> PairReader[list[str]]:
    """Returns a reader of a csv file; its header is the first row not blank, a side is None where a row is too short.

    DataError for a missing column, for quotes that do not match, and for invalid UTF-8 unless `drop`.
    """
    rows = _csv_rows(file, drop)
    header = next(filter(None, rows), [])
    positions = [header.index(column) for column in choose(header, file)] if header else [0, 0]

    def parse(first: int, batch: list[list[str]]) -> Pairs:
        sides = ([row[at] if at < len(row) else None for row in batch] for at in positions)
        return valid_pairs([*zip(*sides, strict=True)])

    return PairReader(rows, parse)


def jsonl_reader(file: str, choose: ChooseColumns, drop: bool) -> PairReader[bytes]:
    """Returns a reader of a file with a JSON object per line; a side is None for an empty line or a missing key.

    DataError for a line that is no object, a value that is no text, and for invalid UTF-8 unless `drop`.
    """
    lines = read_lines(file)
    head: list[bytes] = []
    for line in lines:  # up to the first that is not empty
        head.append(line)
        if line.strip():
            break
    # From the first row of the file, even if it is not wanted: rows of other processes are not parsed.
    columns = choose(_paths(_json_object(file, len(head), head[-1], drop)), file) if head and head[-1].strip() else None

    def parse_line(number: int, line: bytes) -> tuple[Any, Any]:
        row = _json_object(file, number, line, drop)
        if not row or columns is None:
            return None, None
        source, target = (_json_text(row, column, file, number, columns[0] == columns[1]) for column in columns)
        return source, target

    def parse(first: int, batch: list[bytes]) -> Pairs:
        rows = [parse_line(number, line) for number, line in enumerate(batch, start=first + 1)]
        return valid_pairs(rows, None if drop else f"{file}:", first)

    return PairReader(itertools.chain(head, lines), parse)


def _csv_rows(file: str, drop: bool) -> Iterator[list[str]]:
    csv.field_size_limit(MOST_CHARACTERS_OF_A_CELL)
    lines = (_decoded(file, number, line, drop) for number, line in enumerate(read_complete_lines(file), start=1))
    rows = csv.reader(lines, strict=True)
    try:
        yield from rows
    except csv.Error as error:
        raise DataError(
            f"{file}:{rows.line_num}: cannot be read as csv: {error}. A cell with a comma, a quote or a line end in it "
            f"must stand in double quotes, and its quotes be doubled; one above {MOST_CHARACTERS_OF_A_CELL:,} characters mostly "
            "lacks its closing quote; in a .tsv quotes are plain text."
        ) from error


def _decoded(file: str, number: int, line: bytes, drop: bool) -> str:
    """Decodes a line; each byte that is not UTF-8 becomes a lone surrogate, or is refused."""
    if not drop:
        check_utf8(file, number, line)
    return line.decode("utf-8", errors="surrogateescape")


def valid_pairs(pairs: Sequence[tuple[Any, ...]], refused_at: str | None = None, first: int = 0) -> Pairs:
    """Returns the pairs, with U+FFFD for each lone surrogate: pairs that have one count as badly encoded.

    DataError for one where `refused_at`, the place that its number follows, is given; `first`: pairs before these.
    """
    bad, sides = set(), ([source for source, _ in pairs], [target for _, target in pairs])
    for side in sides:
        for position, text in enumerate(side):
            if text is not None and not text.isascii() and LONE_SURROGATE.search(text):
                bad.add(position)
                side[position] = LONE_SURROGATE.sub("\ufffd", text)
    if bad and refused_at is not None:
        raise DataError(
            f"{refused_at}{first + 1 + min(bad)}: not valid Unicode: half of a surrogate pair (\\ud800 to \\udfff). Mend it, "
            "or set data.filters.bad_encoding to drop."
        )
    return Pairs(*sides, bad)


def _json_object(file: str, number: int, line: bytes, drop: bool) -> dict[str, Any]:
    try:
        row = json.loads(_decoded(file, number, line, drop)) if line.strip() else {}
    except (ValueError, RecursionError) as error:
        problem = "too deep" if isinstance(error, RecursionError) else "a number of over 4,300 digits"
        problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else problem
        raise DataError(f"{file}:{number}: cannot be read as JSON: {problem}. Each line must be one object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{file}:{number}: expected a JSON object, {{...}}, in each line; got {_kind(row)}.")
    return row


def _json_text(row: dict[str, Any], column: str, file: str, number: int, may_be_number: bool) -> str | None:
    value: Any = row
    for key in [column] if column in row else column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if may_be_number and type(value) in (int, float):
        return str(value)
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{file}:{number}: column {column!r} holds {_kind(value)}, expected text. Name another in columns.")


def _paths(row: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the names of all values, nested ones with dots."""
    nested = ((f"{prefix}{key}", value) for key, value in row.items())
    found = ([*_paths(value, f"{name}.")] if isinstance(value, dict) else [name] for name, value in nested)
    return list(itertools.chain.from_iterable(found))


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), "null")
