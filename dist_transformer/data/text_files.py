r"""Plain text files, line by line, exactly: a line ends at "\n" and nowhere else, and every byte is accounted for.

Aligned text is read here and not through `datasets`, whose text reader cuts lines where Python's `splitlines` does (at
U+2028, form feeds and others), which would shift one side against the other, and cannot name the line of a bad byte.
Tab-separated files are read here for the same reasons: a quote in them is text, and a lone CR does not end a row.
"""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from dist_transformer.data.corpus_files import COMPRESSIONS
from dist_transformer.errors import DataError

READ_BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines without their end (LF or CR LF) and without a byte order mark; .gz and .zst are unpacked.

    DataError when a compressed file is damaged or cut short.
    """
    try:
        with pa.input_stream(str(path), compression=COMPRESSIONS.get(path.suffix)) as stream:
            for number, line in enumerate(io.BufferedReader(stream, READ_BLOCK_BYTES)):
                text = line.removesuffix(b"\n").removesuffix(b"\r")
                yield text if number else text.removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise DataError(f"{path}: cannot be read to its end ({error}). Copy or download it again.") from error


def scan_file(path: Path, refuse_bad_encoding: bool) -> int:
    """Reads a file once and counts its lines; DataError names file and line of the first invalid UTF-8, if refused."""
    number = 0
    for number, line in enumerate(read_lines(path), start=1):
        if refuse_bad_encoding and not line.isascii() and not is_utf8(line):
            raise _encoding_error(path, number, line)
    return number


def scan_aligned(source: Path, target: Path, refuse_bad_encoding: bool) -> int:
    """`scan_file` of both; DataError with both totals when they have not the same number of lines."""
    source_lines, target_lines = (scan_file(path, refuse_bad_encoding) for path in (source, target))
    if source_lines != target_lines:
        raise DataError(
            f"{source} has {source_lines} lines, but {target} has {target_lines}: aligned text needs as many lines on "
            f"both sides, line n of one being the translation of line n of the other."
        )
    return source_lines


def read_aligned(source: Path, target: Path, batch_rows: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Batches of undecoded lines of both files; DataError when one ends before the other."""
    source_lines, target_lines = read_lines(source), read_lines(target)
    while True:
        batch = (list(itertools.islice(source_lines, batch_rows)), list(itertools.islice(target_lines, batch_rows)))
        if len(batch[0]) != len(batch[1]):
            scan_aligned(source, target, refuse_bad_encoding=False)
            raise DataError(f"{source} or {target} was changed while it was being read. Start again.")
        if not batch[0]:
            return
        yield batch


def read_tsv(
    path: Path, columns: tuple[str, str], batch_rows: int
) -> Iterator[tuple[list[bytes | None], list[bytes | None]]]:
    """Batches of undecoded cells of two columns; None where a line is too short.

    Columns are numbers from 0 in a file without a header, or names from its first line; DataError when the first line
    does not have them.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:  # the caller says that the corpus is empty
        return
    cells = first.split(b"\t")
    if by_number := all(column.isdecimal() for column in columns):
        existing = [str(number) for number in range(len(cells))]
    else:
        existing = [cell.decode("utf-8", errors="replace") for cell in cells]
    positions = [existing.index(column) for column in columns if column in existing]
    if len(positions) < len(columns):
        raise DataError(
            f"{path}: expected columns {', '.join(columns)}, but the first line has {', '.join(map(repr, existing))}. "
            f"Columns are separated by tabs; name two of them, or count them from 0, in `columns`."
        )
    rows = itertools.chain([first], lines) if by_number else lines
    while batch := list(itertools.islice(rows, batch_rows)):
        table = [line.split(b"\t") for line in batch]
        source, target = ([row[at] if at < len(row) else None for row in table] for at in positions)
        yield source, target


def is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _encoding_error(path: Path, number: int, line: bytes) -> DataError:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return DataError(
            f"{path}:{number}: not valid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line. "
            f"Convert the file to UTF-8, or set data.filters.bad_encoding to drop."
        )
    raise AssertionError("called for a valid line")
