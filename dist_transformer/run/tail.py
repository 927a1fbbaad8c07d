"""The end of a file that may be huge and still grows, read in pieces."""

from collections.abc import Iterator
from pathlib import Path

PIECE_BYTES = 1 << 16


def last_lines(path: Path, max_bytes: int = PIECE_BYTES, end: int | None = None) -> Iterator[str]:
    """The whole lines of a file from the last one back, out of its last `max_bytes`; none where none can be read.

    What stands behind the last line break comes first, also when it is nothing.

    Args:
        end: where to begin, in bytes; None: at the end of the file.
    """
    try:
        with path.open("rb") as file:
            position = file.seek(0, 2) if end is None else end
            least = max(0, position - max_bytes)
            rest = b""
            while position > least:
                size = min(PIECE_BYTES, position - least)
                position -= size
                file.seek(position)
                rest, *lines = (file.read(size) + rest).split(b"\n")
                yield from (line.decode(errors="replace") for line in reversed(lines))
            if position == 0:
                yield rest.decode(errors="replace")
    except OSError:
        return


def end_of_last_line(path: Path) -> int:
    """In bytes: what stands behind it is being written."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        while position > 0:
            start = max(0, position - PIECE_BYTES)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


class GrowingFile:
    """Reads what is added to a file, line by line. It may be missing at first."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self._position = position
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        """The lines that were completed since the last call; a file that was cut is read from its beginning."""
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
        """What stands behind the last line break."""
        return self._rest.decode(errors="replace")
