"""A large file translated in parts, by any number of processes on any machines that see the same disk.

The lines are cut into chunks, whose size depends on the number of lines alone. Beside the file that is to be written there
is, until it is whole, a folder:

    OUTPUT.parts/plan.json     what is translated, with what: input, models, search
    OUTPUT.parts/0000000.txt   the translations of chunk 0, written whole

Who finishes the last part joins all of them into OUTPUT, leaves the plan beside it as OUTPUT.plan.json, and removes the
folder. So a new start finds out what is done, whoever did it.
"""

import codecs
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from dist_transformer.errors import UserError
from dist_transformer.files import read_json, replacing, write_json, write_text
from dist_transformer.run.outputs import check_output, is_stream, writing

SMALLEST_CHUNK_LINES, LARGEST_CHUNK_LINES, MOST_SMALL_CHUNKS = 256, 16_384, 1024
"""A chunk fills batches of sentences of like length; a folder of many thousand files would slow a cluster's disk."""
PLAN_NAME = "plan.json"
PART_PATTERN = f"{'[0-9]' * 7}*.txt"
READ_BYTES = 1 << 20

Plan = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """The parts of one output. `open_parts` makes it."""

    output: Path
    plan: Plan
    num_chunks: int

    def is_done(self, chunk: int) -> bool:
        """Whether the part is there, or the output made of it."""
        return self._part(chunk).exists() or is_whole(self.output)

    def num_done(self) -> int:
        """Parts that are there, whoever made them."""
        return sum(self._part(chunk).exists() for chunk in range(self.num_chunks))

    def write(self, chunk: int, lines: Sequence[str]) -> None:
        """Writes a part whole; or nothing where the output has been joined meanwhile.

        Raises:
            UserError: the folder of the parts was removed, or is another translation's by now.
            MachineError: the disk is full, or fails.
        """
        with _locked(self.output):
            if not self._is_joined():
                write_text(self._part(chunk), "".join(f"{line}\n" for line in lines))

    def join(self) -> bool:
        """Makes the output if every part is there; whether it is whole now. Any number of processes may call it.

        Raises UserError and MachineError as `write` does.
        """
        with _locked(self.output):
            if self._is_joined():
                return True
            if self.num_done() < self.num_chunks:
                return False
            # The plan first: an output without one is somebody else's.
            write_json(_plan_of(self.output), self.plan)
            with replacing(self.output) as temporary, temporary.open("wb") as out:
                for chunk in range(self.num_chunks):
                    with self._part(chunk).open("rb") as part:
                        shutil.copyfileobj(part, out, READ_BYTES)
            _remove_folder(self.output)
            return True

    def _is_joined(self) -> bool:
        """Whether the output is whole; UserError where neither it nor the folder of the parts is this translation's."""
        planned = _plan_of(self.output) if is_whole(self.output) else _folder(self.output) / PLAN_NAME
        if not planned.exists():
            raise UserError(f"{planned.parent}: was removed while it was written to; start the same command again")
        _refuse_other(planned, self.plan, self.output)
        return is_whole(self.output)

    def _part(self, chunk: int) -> Path:
        return _folder(self.output) / f"{chunk:07}.txt"


def open_parts(output: Path, plan: Plan, num_chunks: int) -> Parts | None:
    """The parts of the output, as far as they are done; None when it is whole already, by the same plan.

    Raises:
        UserError: the output, or its parts, are of another plan; there is a file of unknown origin; or nothing can be
            written at this path.
        MachineError: the disk is full, or fails.
    """
    if is_stream(output):
        raise UserError(
            f"{output}: is a device or a pipe, but the output is made of parts: name a file, or leave --input and --output out "
            "and give < FILE"
        )
    check_output(output, "a translation", is_whole, is_file=True)  # a lock would be waited for where none can be
    with _locked(output):
        if is_whole(output):
            _refuse_other(_plan_of(output), plan, output)
            _remove_folder(output)  # left by a process that died while it cleared up
            return None
        check_output(output, "a translation", is_file=True)
        if (of_before := _plan_of(output)).exists():  # of an output that was removed, or was about to be written
            _read_plan(of_before)
        if (planned := _folder(output) / PLAN_NAME).exists():
            _refuse_other(planned, plan, output)
        else:
            _clear(planned.parent, (f".{PLAN_NAME}.*.tmp",))  # of a process that died before it had begun
            check_output(planned.parent, "the parts of a translation")
            write_json(planned, plan)
        of_before.unlink(missing_ok=True)
        output.unlink(missing_ok=True)  # an empty file: one beside a plan is whole
    return Parts(output, plan, num_chunks)


def is_whole(output: Path) -> bool:
    """Whether the output has been joined of its parts."""
    return _plan_of(output).exists() and output.exists()


def chunk_lines(num_lines: int) -> int:
    """Lines of a chunk of a file of so many lines."""
    return min(LARGEST_CHUNK_LINES, max(SMALLEST_CHUNK_LINES, -(-num_lines // MOST_SMALL_CHUNKS)))


def digest_of(path: Path) -> str:
    """SHA-256 of a file. UserError: it cannot be read."""
    digest = hashlib.sha256()
    with _opened(path) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def digest_and_lines(path: Path) -> tuple[str, int]:
    """SHA-256 of a text file, and how many lines it has.

    Raises:
        UserError: it cannot be read, now and once more; or it is not valid UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(
            f"{path}: is a pipe or a device, but it is read more than once: write its lines into a file first, or give them "
            "to translate by < FILE"
        )
    digest, decoder, num_lines, last = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0, b"\n"
    with _opened(path) as file:
        try:
            while data := file.read(READ_BYTES):
                digest.update(data)
                decoder.decode(data)
                num_lines, last = num_lines + data.count(b"\n"), data[-1:]
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            file.seek(0)
            for _ in decoded_lines(file, str(path)):  # it tells the line
                pass
            raise
    return digest.hexdigest(), num_lines + (last != b"\n")


class LineReader:
    """Reads ranges of lines of a file, from its beginning on."""

    def __init__(self, path: Path) -> None:
        self._lines = numbered_lines(path)
        self._next = 0

    def read(self, first: int, count: int) -> list[str]:
        """So many lines from number `first` on, counted from 0, or those up to the end; `first` never goes back.

        Raises:
            UserError: one of them, or one before, is not valid UTF-8.
        """
        assert first >= self._next, "it reads forward"
        lines = list(islice(self._lines, first - self._next, first - self._next + count))
        self._next = first + count
        return lines


def numbered_lines(path: Path) -> Iterator[str]:
    """The lines of a file without their ends.

    Raises:
        UserError: the file cannot be read, or a line is not valid UTF-8.
    """
    with _opened(path) as file:
        yield from decoded_lines(file, str(path))


def decoded_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines of bytes as text without their ends; UserError, with `name` and the number, for one that is not UTF-8."""
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not valid UTF-8 ({error.reason}); convert it first") from None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected a text file in UTF-8") from None


def _read_plan(path: Path) -> Plan:
    """UserError: it is not what `open_parts` writes, but somebody else's."""
    try:
        plan = read_json(path)
    except (OSError, ValueError):
        plan = None
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
        raise UserError(
            f"{output}: was begun as another translation ({'; '.join(differing)}): go on as it was begun, name another file, "
            f"or remove {_made_of(output)}"
        )


def _short(value: Any) -> str:
    """A digest is known by its beginning."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text


def _folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def _plan_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.plan.json")


def _made_of(output: Path) -> str:
    """What to remove, so that it can be made anew."""
    return f"{output} and {_plan_of(output).name}" if is_whole(output) else f"the folder {_folder(output)}"


def _remove_folder(output: Path) -> None:
    """The plan last, which says what the rest is of. A folder with files of somebody else's stays."""
    _clear(_folder(output), (PART_PATTERN, f".{PART_PATTERN}.*.tmp", f".{PLAN_NAME}.*.tmp", PLAN_NAME))
    with suppress(OSError):
        _folder(output).rmdir()


def _clear(folder: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """For moments only. A soft lock, of a disk without real ones, would outlive a process that dies."""
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(output.with_name(f".{output.name}.lock"), fallback_to_soft=False):
            yield
