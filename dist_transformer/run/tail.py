"""Reading of lines of a file that may be huge and still grows: the last ones in pieces, new ones from an offset."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PIECE_BYTES = 1 << 16


def last_lines(path: Path, max_bytes: int = PIECE_BYTES, end: int | None = None) -> Iterator[str]:
    """Yields the complete lines in the last `max_bytes` of a file, the last one first; none if it cannot be read.

    The text after the last line break comes first, even if it is empty. `end`: offset in bytes at which the reading
    begins; None: the end of the file.
    """
    with suppress(OSError):
        for line in lines_backwards(path, end, max_bytes):
            yield line.decode(errors="replace")


def lines_backwards(path: Path, end: int | None = None, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yields lines as `last_lines` does, with errors of the disk."""
    with path.open("rb") as file:
        # The end of an open file: on NFS another machine may have written since a stat.
        end = file.seek(0, 2) if end is None else end
        begin, rest = 0 if max_bytes is None else max(0, end - max_bytes), b""
        while end > begin:
            size = min(max(PIECE_BYTES, len(rest)), end - begin)  # a long line is not joined from many pieces
            end -= size
            file.seek(end)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        if end == 0:
            yield rest


def end_of_last_line(path: Path) -> int:
    """Returns the offset in bytes after the last line break; the text after it is being written."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
    return size - len(next(lines_backwards(path, size)))


def lines_from(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yields the complete lines after byte `offset`, each with the offset of its end, at which a later call may begin."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset
