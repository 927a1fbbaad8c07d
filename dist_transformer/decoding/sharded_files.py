"""Translation of a large file in parts, by any number of processes on any machines that see the same disk.

docs/translate.md says what lies in OUTPUT.parts and when. Chunks depend only on the number of lines, so that a new start
finds all finished parts, whichever process wrote them.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock

from dist_transformer.errors import MachineError, UserError
from dist_transformer.files import MISPLACED, file_sha256, patiently, read_json, replacing, write_json, write_text
from dist_transformer.run.outputs import check_output, is_stream, writing

SMALLEST_CHUNK_LINES, LARGEST_CHUNK_LINES, MOST_SMALL_CHUNKS = 256, 16_384, 1024
"""Limits of a chunk, which fills batches of similar length, and of small chunks: many files slow a cluster's disk."""
PLAN_NAME = "plan.json"
PART_PATTERN = f"{'[0-9]' * 7}*.txt"

Plan = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """The parts of one output, created by `open_parts`."""

    output: Path
    plan: Plan
    num_chunks: int

    def is_done(self, chunk: int) -> bool:
        """True if the part, or the output made of it, exists."""
        return self._part(chunk).exists() or is_complete(self.output)

    def num_done(self) -> int:
        """Number of existing parts, whichever process wrote them."""
        return sum(self._part(chunk).exists() for chunk in range(self.num_chunks))

    def write(self, chunk: int, lines: Sequence[str]) -> None:
        """Writes a part atomically; or nothing if the output has been joined meanwhile. Raises as `writing`, and
        UserError: the folder of the parts was removed, or now belongs to another translation."""
        with _locked(self.output):
            if not self._is_joined():
                write_text(self._part(chunk), "".join(f"{line}\n" for line in lines))

    def join(self) -> bool:
        """Makes the output if every part exists; returns True if it is complete. Any number of processes may call it.
        Raises as `write`."""
        with _locked(self.output):
            if self._is_joined():
                return True
            if self.num_done() < self.num_chunks:
                return False
            # The plan first: an output without one counts as an unrelated file.
            write_json(_plan_of(self.output), self.plan)
            with replacing(self.output) as temporary, temporary.open("wb") as out:
                for chunk in range(self.num_chunks):
                    out.write(patiently(part := self._part(chunk), part.read_bytes, MISPLACED))
            _remove_folder(self.output)
            return True

    def _is_joined(self) -> bool:
        """True if the output is complete. Raises UserError if neither it nor the folder belongs to this translation."""
        planned = _plan_of(self.output) if is_complete(self.output) else _folder(self.output) / PLAN_NAME
        if not planned.exists():
            raise UserError(f"{planned.parent}: was removed while it was written to; start the same command again")
        _refuse_other(planned, self.plan, self.output)
        return is_complete(self.output)

    def _part(self, chunk: int) -> Path:
        return _folder(self.output) / f"{chunk:07}.txt"


def open_parts(output: Path, plan: Plan, num_chunks: int) -> Parts | None:
    """Opens the parts of the output, finished or not; None if the output is already complete by the same plan. Raises as
    `writing`, and UserError: the output or its parts belong to another plan, or there is a file of unknown origin."""
    if is_stream(output):
        raise UserError(
            f"{output}: is a device or a pipe, but the output is made of parts: name a file, or leave --input and --output out "
            "and give < FILE"
        )
    check_output(output, "a translation", is_complete, is_file=True)  # before waiting for a lock where none can exist
    output = Path(os.path.realpath(output))  # a link stays a link
    with _locked(output):
        if is_complete(output):
            _refuse_other(_plan_of(output), plan, output)
            _remove_folder(output)  # left by a process that died during its removal
            return None
        check_output(output, "a translation", is_file=True)
        if (of_before := _plan_of(output)).exists():  # the output was removed, or was about to be written
            _read_plan(of_before)
        if (planned := _folder(output) / PLAN_NAME).exists():
            _refuse_other(planned, plan, output)
        else:
            check_output(planned.parent, "the parts of a translation")
            write_json(planned, plan)
        of_before.unlink(missing_ok=True)
        output.unlink(missing_ok=True)  # an empty file: one with a plan would be complete
    return Parts(output, plan, num_chunks)


def is_complete(output: Path) -> bool:
    """True if the output has been joined from its parts."""
    output = Path(os.path.realpath(output))
    return _plan_of(output).exists() and output.exists()


def chunk_lines(num_lines: int) -> int:
    """Lines of a chunk in a file of `num_lines` lines."""
    return min(LARGEST_CHUNK_LINES, max(SMALLEST_CHUNK_LINES, -(-num_lines // MOST_SMALL_CHUNKS)))


def digest_of(path: Path) -> str:
    """SHA-256 of a file. Raises UserError if it cannot be read, MachineError if its disk does not answer."""
    try:
        return patiently(path, lambda: file_sha256(path), MISPLACED)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def digest_and_lines(path: Path) -> tuple[str, int]:
    """SHA-256 and number of lines of a text file. Raises UserError: it cannot be read, or not a second time; or it is
    not valid UTF-8."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(
            f"{path}: is a pipe or a device, but it is read more than once: write its lines into a file first, or give them "
            "to translate by < FILE"
        )
    digest = hashlib.sha256()

    def hashed(lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            digest.update(line)
            yield line

    with _opened(path) as file:
        num_lines = sum(1 for _ in decoded_lines(hashed(file), str(path)))
    return digest.hexdigest(), num_lines


def same_lines(*paths: Path) -> int:
    """Returns the number of lines of text files. Raises UserError: one cannot be read, or they differ in it."""
    found = {path: digest_and_lines(path)[1] for path in paths}
    if len({*found.values()}) > 1:
        each = ", ".join(f"{path} has {number}" for path, number in found.items())
        raise UserError(f"{each} lines: expected files of as many, line by line")
    return found[paths[0]]


class LineReader:
    """Reads ranges of lines of a file in ascending order; created before the file's digest, or number of lines, is taken."""

    def __init__(self, path: Path) -> None:
        with suppress(OSError):
            if path.is_file():
                path.open("rb").close()  # a file server tells what is there now
        self._path, self._lines, self._next, self._version = path, numbered_lines(path), 0, _version_of(path)

    def read(self, first: int, count: int) -> list[str]:
        """Reads `count` lines from line `first`, counted from 0; `first` must not decrease. Raises UserError: the file has
        changed since the reader was created; one of the lines, or an earlier one, is not valid UTF-8."""
        assert first >= self._next, "it reads forward"
        lines = list(islice(self._lines, first - self._next, first - self._next + count))
        if len(lines) != count or _version_of(self._path) != self._version:
            raise UserError(f"{self._path}: changed while it was read; put it back, or begin another output")
        self._next = first + count
        return lines


def numbered_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file without line breaks. Raises UserError: the file cannot be read, or a line is not valid
    UTF-8."""
    with _opened(path) as file:
        yield from decoded_lines(file, str(path))


def decoded_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Decodes lines, without ends and byte order mark. Raises UserError, with `name` and number, for one that is not UTF-8."""
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            from dist_transformer.data.sources.files import PACKED_STARTS  # here: it imports pyarrow

            if line.startswith(PACKED_STARTS):
                raise UserError(f"{name}: is compressed; unpack it (zcat, zstdcat, xzcat, bzcat or unzip)") from None
            raise UserError(f"{name}, line {number}: not valid UTF-8 ({error.reason}); convert it first") from None


def _version_of(path: Path) -> tuple[int, ...] | None:
    """Returns numbers that change with the file, which None stands for if it is not there."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with patiently(path, lambda: path.open("rb"), MISPLACED) as file:
            yield file
    except OSError as error:
        if error.filename is None:  # of a read: only an opening names the file
            raise MachineError(f"{path}: cannot be read ({error}): start again when its disk answers") from error
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected a text file in UTF-8") from None


def _read_plan(path: Path) -> Plan:
    """Reads a plan. Raises UserError if `open_parts` did not write the file, MachineError if it cannot be read now."""
    plan = None
    with suppress(OSError, ValueError):
        plan = patiently(path, lambda: read_json(path), MISPLACED)
    if not isinstance(plan, dict) or "input" not in plan:
        raise UserError(
            f"{path}: is there already, and is no plan of a translation: move it away, or name another output"
        )
    return plan


def _refuse_other(planned: Path, now: Plan, output: Path) -> None:
    there = _read_plan(planned)
    differing = [
        f"{name}: {_short(there.get(name))} there, {_short(now.get(name))} now"
        for name in {**there, **now}
        if there.get(name) != now.get(name)
    ]
    if differing:
        made = f"{output} and {_plan_of(output).name}" if is_complete(output) else f"the folder {_folder(output)}"
        raise UserError(
            f"{output}: was begun as another translation ({'; '.join(differing)}): continue as it was begun, name another file, "
            f"or remove {made}"
        )


def _short(value: Any) -> str:
    """Text of a value, with digests shortened."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text


def _folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def _plan_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.plan.json")


def _remove_folder(output: Path) -> None:
    """Removes the folder of parts, the plan last, because it identifies the rest. Unrelated files keep the folder."""
    for pattern in (PART_PATTERN, f".{PART_PATTERN}.*.tmp", f".{PLAN_NAME}.*.tmp", PLAN_NAME):
        for path in _folder(output).glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        _folder(output).rmdir()


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Context with a lock, held briefly. A soft lock, on disks without real ones, would outlive a dead process."""
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(output.with_name(f".{output.name}.lock"), fallback_to_soft=False):
            yield
