r"""Exact readers of files of lines: aligned text, tsv, jsonl, and csv, whose quoted cells may span lines.

A line ends only at "\n", every byte is accounted for, and every cell stays text (`12`, `NA` and `2020-01-01` too). The text
reader of `datasets` cuts lines where Python's `splitlines` does (at U+2028, form feeds and others), which would shift one side
against the other. In a tsv a quote is text, and a lone CR does not end a row.
"""

import csv
import io
import itertools
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from dist_transformer.config.paths import is_address
from dist_transformer.data.sources.files import COMPRESSIONS, PACKED_STARTS, compression_suffix
from dist_transformer.data.sources.readers import PairReader, Pairs
from dist_transformer.data.sources.remote import named_errors, open_binary
from dist_transformer.data.sources.text import decoded
from dist_transformer.errors import DataError

SCAN_LINES = 1 << 18
"""Lines between two progress reports of a scan."""
READ_BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOST_CHARACTERS_OF_A_CELL = 1 << 26
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ColumnNames = tuple[str, str]
ChooseColumns = Callable[[list[str], str], ColumnNames]
"""Takes the existing columns and the file's name for messages; returns the source and the target column."""


def read_complete_lines(file: str) -> Iterator[bytes]:
    """Yields lines with their ends, without a byte order mark; decompresses .gz, .zst and .xz.

    DataError if the file cannot be opened, is damaged or truncated, or is compressed and not named so.
    """
    with named_errors(file):
        content, suffix = open_binary(file), compression_suffix(file)
        raw = _XzStreams(content) if suffix == ".xz" else pa.input_stream(content, compression=COMPRESSIONS.get(suffix))
        stream = io.BufferedReader(raw, READ_BLOCK_BYTES)
    advice = "Check the network" if is_address(file) else "Copy or download it again"
    with stream, named_errors(file, f"cannot be read to its end. {advice}"):
        if not suffix and stream.peek().startswith(PACKED_STARTS):
            raise DataError(f"{file}: compressed, but not named {', '.join(COMPRESSIONS)}, which are read. Unpack it.")
        for number, line in enumerate(stream):
            yield line if number else line.removeprefix(BYTE_ORDER_MARK)


def read_lines(file: str) -> Iterator[bytes]:
    """Yields the lines of `read_complete_lines` without their ends (LF or CR LF)."""
    for line in read_complete_lines(file):
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def scan_file(file: str, refuse_bad_encoding: bool, progress: Callable[[int], None]) -> int:
    """Reads a file once and counts its lines; DataError names file and line of the first invalid UTF-8, if refused.

    `progress` is called with the number of lines read, every SCAN_LINES lines.
    """
    number = 0
    for number, line in enumerate(read_lines(file), start=1):
        if refuse_bad_encoding and not line.isascii():
            check_utf8(file, number, line)
        if number % SCAN_LINES == 0:
            progress(number)
    return number


def scan_aligned(source: str, target: str, refuse_bad_encoding: bool, progress: Callable[[int], None]) -> int:
    """Scans both files by `scan_file`; DataError with both totals if their numbers of lines differ."""
    source_lines, target_lines = (scan_file(file, refuse_bad_encoding, progress) for file in (source, target))
    if source_lines != target_lines:
        raise _unequal(source, source_lines, target, target_lines)
    return source_lines


def aligned_reader(source: str, target: str, drop: bool) -> PairReader[tuple[bytes, bytes]]:
    """Returns a reader of two files; DataError, with both totals, if one ends before the other. `drop`: mark invalid UTF-8
    instead of refusing it."""

    def parse(first: int, lines: list[tuple[bytes, bytes]]) -> Pairs:
        sides = [line for line, _ in lines], [line for _, line in lines]
        (source_texts, bad_source), (target_texts, bad_target) = (decoded(side) for side in sides)
        if not drop:
            for file, side, bad in ((source, sides[0], bad_source), (target, sides[1], bad_target)):
                refuse_bad_lines(file, first, side, bad)
        return Pairs(source_texts, target_texts, {*bad_source, *bad_target})

    return PairReader(_aligned_lines(source, target), parse)


def tsv_reader(file: str, columns: tuple[str, str], drop: bool) -> PairReader[bytes]:
    """Returns a reader of two columns; a side is None where a line is too short.

    Columns are numbers from 0 in a file without a header, or names from its first line; DataError if the first line
    does not have them.
    """
    lines = read_lines(file)
    first_line = next(lines, None)
    if first_line is None:  # the caller reports that the corpus is empty
        return PairReader(iter(()), lambda first, batch: Pairs([], [], set()))
    by_number = all(column.isdecimal() for column in columns)
    positions = _tsv_positions(file, first_line, columns, by_number)

    def parse(first: int, batch: list[bytes]) -> Pairs:
        texts, bad = decoded(batch)
        if not drop:
            refuse_bad_lines(file, first + (not by_number), batch, bad)
        cells = [(text or "").split("\t") for text in texts]
        source, target = ([row[at] if at < len(row) else None for row in cells] for at in positions)
        return Pairs(source, target, set(bad))

    return PairReader(itertools.chain([first_line], lines) if by_number else lines, parse)


def refuse_bad_lines(file: str, first: int, lines: Sequence[bytes], bad: Sequence[int]) -> None:
    """Raises a DataError for the first bad position; `lines` begin at line number `first`, counted from 0."""
    if bad:
        check_utf8(file, first + bad[0] + 1, lines[bad[0]])


def check_utf8(file: str, number: int, line: bytes) -> None:
    """Raises a DataError with the position of the first byte in a line that is not valid UTF-8; `number` is from 1."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}:{number}: not valid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line. "
            f"Convert the file to UTF-8, or set data.filters.bad_encoding to drop."
        ) from None


class _XzStreams(io.RawIOBase):
    """Decompresses all streams of an .xz file; LZMAFile takes a damaged one for the end of the file."""

    def __init__(self, content: BinaryIO) -> None:
        self._content, self._stream = content, lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = packed = b""
        while not part:
            if self._stream.eof:
                packed = self._stream.unused_data
                while not (packed := packed.lstrip(b"\0")):  # between streams zeros may stand
                    if not (packed := self._content.read(READ_BLOCK_BYTES)):
                        return 0
                self._stream = lzma.LZMADecompressor()
            elif self._stream.needs_input and not (packed := self._content.read(READ_BLOCK_BYTES)):
                raise EOFError("the compressed data are cut off")
            part, packed = self._stream.decompress(packed, len(buffer)), b""
        buffer[: len(part)] = part
        return len(part)


def _aligned_lines(source: str, target: str) -> Iterator[tuple[bytes, bytes]]:
    sides = read_lines(source), read_lines(target)
    for number, (source_line, target_line) in enumerate(itertools.zip_longest(*sides), start=1):
        if source_line is None or target_line is None:
            longer = number + sum(1 for _ in itertools.chain(*sides))
            ends = (longer, number - 1) if target_line is None else (number - 1, longer)
            raise _unequal(source, ends[0], target, ends[1])
        yield source_line, target_line


def _unequal(source: str, source_lines: int, target: str, target_lines: int) -> DataError:
    return DataError(
        f"{source} has {source_lines} lines, but {target} has {target_lines}: aligned text needs as many lines on "
        f"both sides, line n of one being the translation of line n of the other."
    )


def _tsv_positions(file: str, first_line: bytes, columns: tuple[str, str], by_number: bool) -> list[int]:
    cells = enumerate(first_line.split(b"\t"))
    existing = [str(number) if by_number else cell.decode("utf-8", errors="replace") for number, cell in cells]
    positions = [existing.index(column) for column in columns if column in existing]
    if len(positions) < len(columns):
        raise DataError(
            f"{file}: expected columns {', '.join(columns)}, but the first line has {', '.join(map(repr, existing))}. "
            f"Columns are separated by tabs; name two of them, or count them from 0, in `columns`."
        )
    return positions


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
