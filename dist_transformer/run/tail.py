"""Reading of the end of a file that may be huge and still grows, in pieces."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PIECE_BYTES = 1 << 16


def last_lines(path: Path, max_bytes: int = PIECE_BYTES, end: int | None = None) -> Iterator[str]:
    """Yields the complete lines in the last `max_bytes` of a file, the last one first; none if it cannot be read.

    The text after the last line break comes first, even if it is empty.

    Args:
        end: offset in bytes at which the reading begins; None: the end of the file.
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


class GrowingFile:
    """Reads the lines that are appended to a file. It may be missing at first."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self._position = position
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        """Yields the lines completed since the last call; a file that was truncated is read from its beginning."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._position:
                    self._position, self._rest = 0, b""
                file.seek(self._position)
                while piece := file.read(PIECE_BYTES):
                    self._position += len(piece)
                    *lines, self._rest = (self._rest + piece).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
        except FileNotFoundError:
            return

    def unfinished_line(self) -> str:
        """Returns the text after the last line break."""
        return self._rest.decode(errors="replace")
