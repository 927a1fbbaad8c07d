"""A file in parts: whole or not there, in order, gone on with by anybody, never mixed with another's."""

import bz2
import errno
import fcntl
import gzip
import lzma
import multiprocessing
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from source_helpers import zipped

from dist_transformer import files
from dist_transformer.decoding import sharded_files
from dist_transformer.decoding.sharded_files import (
    LineReader,
    Parts,
    chunk_lines,
    decoded_lines,
    digest_and_lines,
    digest_of,
    is_complete,
    numbered_lines,
    open_parts,
)
from dist_transformer.errors import MachineError, UserError

PLAN = {"input": "a" * 64, "beam_size": 4}
TEXT = ["one", "", "zwölf\u2028drei", "end"]


def opened(output: Path, num_chunks: int = 3) -> Parts:
    parts = open_parts(output, PLAN, num_chunks)
    assert parts is not None
    return parts


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_parts_written_in_any_order_become_the_output_with_the_last(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    parts = opened(output)
    for chunk, lines in ((2, ["e"]), (0, ["a", "b"])):
        parts.write(chunk, lines)
        assert not parts.join()
        assert not is_complete(output)
    assert [parts.is_done(chunk) for chunk in range(3)] == [True, False, True]
    again = opened(output)
    assert again.num_done() == 2
    again.write(1, ["", "d"])
    assert again.join()
    assert parts.join()
    assert output.read_text() == "a\nb\n\nd\ne\n"
    assert names(output.parent) == {"out", "out.plan.json"}
    assert open_parts(output, PLAN, 3) is None
    assert parts.is_done(1), "nobody needs it any more"


@pytest.mark.parametrize("failures", [1, 10**6])
def test_a_disk_that_stutters_is_no_mistake_of_the_user(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").write_text("one\ntwo\n")
    opened(tmp_path / "out")
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))
    left, opens = [0], Path.open

    def stutters(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if path.name in ("model", "plan.json") and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return opens(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", stutters)
    for read in (digest_of, digest_and_lines, lambda path: opened(path.with_name("out"))):
        left[0] = failures
        with pytest.raises(MachineError, match="cannot be read now") if failures > 1 else nullcontext():
            read(tmp_path / "model")


@pytest.mark.parametrize("read", [digest_and_lines, lambda path: [*numbered_lines(path)]])
def test_a_file_that_opens_and_cannot_be_read_is_named(read: Callable[[Path], Any]) -> None:
    path = Path("/proc/self/mem")  # at 0 there is no memory
    with pytest.raises(MachineError, match=rf"{path}: cannot be read \(.*Input/output error\): start again when"):
        read(path)


def test_a_part_that_cannot_be_read_for_a_moment_is_joined_and_a_disk_that_is_away_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, left, read_bytes = opened(tmp_path / "out", 1), [10**6], Path.read_bytes
    parts.write(0, ["a"])
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))

    def stutters(path: Path) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", stutters)
    with pytest.raises(MachineError, match=r"0000000\.txt: cannot be read now"):
        parts.join()
    left[0] = 1
    assert parts.join()
    assert (tmp_path / "out").read_text() == "a\n"


@pytest.mark.parametrize("there", [None, ""])
def test_an_output_that_is_a_link_stays_one_and_the_parts_are_where_it_leads_to(
    tmp_path: Path, there: str | None
) -> None:
    link, real = tmp_path / "link", tmp_path / "deep" / "real"
    link.symlink_to("deep/real")
    if there is not None:
        real.parent.mkdir()
        real.write_text(there)
    opened(link, num_chunks=1).write(0, ["a"])
    assert opened(link, num_chunks=1).join()
    assert link.readlink() == Path("deep/real")
    assert real.read_text() == "a\n"
    assert names(tmp_path) == {"link", "deep"}
    assert names(real.parent) == {"real", "real.plan.json"}
    assert open_parts(link, PLAN, 1) is open_parts(real, PLAN, 1) is None


def test_no_lines_give_an_empty_output(tmp_path: Path) -> None:
    assert opened(tmp_path / "out", 0).join()
    assert (tmp_path / "out").read_bytes() == b""


def test_a_disk_that_keeps_no_locks_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(
        UserError, match=r"disk keeps no file locks \(No locks .* give data.prepared or --output there$"
    ):
        opened(tmp_path / "out")


def test_what_another_plan_began_or_made_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    parts = opened(output)
    other = {"input": "b" * 64, "beam_size": 4, "seed": 1}
    differing = r"input: a{12} there, b{12} now; seed: none there, 1 now"
    with pytest.raises(UserError, match=rf"{differing}\): continue as it was begun, .* remove the folder .*out\.parts"):
        open_parts(output, other, 3)
    for chunk in range(3):
        parts.write(chunk, [])
    assert parts.join()
    with pytest.raises(UserError, match=rf"{differing}\).* or remove .*out and out\.plan\.json"):
        open_parts(output, other, 3)
    output.unlink()
    assert open_parts(output, other, 3) is not None, "its output was removed"


def test_a_file_of_unknown_origin_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match=r"out: is there already \(a file of 4 bytes\)"):
        open_parts(tmp_path / "out", PLAN, 1)
    assert names(tmp_path) == {"out"}


def test_parts_without_a_plan_are_refused_and_stay(tmp_path: Path) -> None:
    output = tmp_path / "out"
    opened(output).write(0, ["of something else"])
    (tmp_path / "out.parts" / "plan.json").unlink()
    with pytest.raises(UserError, match=r"out\.parts: is there already \(a folder with 0000000\.txt\)"):
        opened(output)
    assert names(tmp_path / "out.parts") == {"0000000.txt"}


def test_a_folder_and_a_plan_of_somebody_else_are_refused_and_stay(tmp_path: Path) -> None:
    output, folder, plan = tmp_path / "out", tmp_path / "out.parts", tmp_path / "out.plan.json"
    folder.mkdir()
    (folder / "plan.json").write_text('{"rooms": 3}')
    with pytest.raises(UserError, match=r"out\.parts/plan\.json: is there already, and is no plan of a translation"):
        opened(output)
    (folder / "plan.json").rename(plan)
    with pytest.raises(UserError, match=r"out\.plan\.json: is there already, and is no plan of a translation"):
        opened(output)
    assert plan.read_text() == '{"rooms": 3}'
    assert names(tmp_path) == {"out.parts", "out.plan.json"}
    assert names(folder) == set()


def test_what_somebody_put_among_the_parts_stays(tmp_path: Path) -> None:
    parts = opened(tmp_path / "out", 1)
    (tmp_path / "out.parts" / "notes.txt").write_text("mine")
    parts.write(0, ["text"])
    assert parts.join()
    assert names(tmp_path / "out.parts") == {"notes.txt"}


@pytest.mark.parametrize("folder", [".", "/", ".."])
def test_an_output_in_parts_cannot_be_a_folder(folder: str) -> None:
    with pytest.raises(UserError, match=r"is there already \(a folder with "):
        opened(Path(folder))


def test_an_output_in_parts_cannot_be_a_device() -> None:
    for path in (Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(UserError, match=f"{path}: is a device or a pipe"):
            opened(path)
    assert Path("/dev/null").is_char_device()


def test_a_part_that_comes_late_is_not_mixed_with_another_translation(tmp_path: Path) -> None:
    output = tmp_path / "out"
    late = opened(output, 1)
    first = opened(output, 1)
    first.write(0, ["text"])
    assert first.join()
    late.write(0, ["once more"])
    assert late.join()
    assert names(tmp_path) == {"out", "out.plan.json"}
    output.unlink()
    other = open_parts(output, {**PLAN, "seed": 2}, 1)
    assert other is not None
    for act in (lambda: late.write(0, ["late"]), late.join):
        with pytest.raises(UserError, match="seed: 2 there, none now"):
            act()
    assert other.num_done() == 0
    shutil.rmtree(tmp_path / "out.parts")
    with pytest.raises(UserError, match=r"out\.parts: was removed while it was written to"):
        other.write(0, ["text"])
    assert not (tmp_path / "out.parts").exists()


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "x" / "out", Path("/proc/x/out")):
        with pytest.raises(UserError, match=f"{place}: cannot be written") as refusal:
            open_parts(place, PLAN, 1)
        assert not isinstance(refusal.value, MachineError)


def test_a_full_disk_is_the_machines_fault_and_the_parts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    parts = opened(tmp_path / "out", 1)
    with monkeypatch.context() as patched:
        patched.setattr(sharded_files, "write_text", fail)
        with pytest.raises(MachineError, match="No space left on device"):
            parts.write(0, ["text"])
    parts.write(0, ["text"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(MachineError, match="No space left on device"):
            parts.join()
    assert parts.join()


@pytest.mark.parametrize("dies_at", ["replacing", "_remove_folder"])
def test_a_join_that_dies_in_the_middle_is_done_by_the_next_start(
    dies_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    output = tmp_path / "out"
    parts = opened(output, 1)
    parts.write(0, ["text"])
    with monkeypatch.context() as patched:
        patched.setattr(sharded_files, dies_at, die)
        with pytest.raises(Killed):
            parts.join()
    assert is_complete(output) == (dies_at == "_remove_folder")
    again = open_parts(output, PLAN, 1)
    if dies_at == "replacing":
        assert again is not None
        assert again.is_done(0)
        assert again.join()
    assert output.read_text() == "text\n"
    assert open_parts(output, PLAN, 1) is None
    assert names(tmp_path) == {"out", "out.plan.json"}


def test_a_folder_half_removed_keeps_its_plan_until_the_last_part_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    parts = opened(output, 2)
    for chunk in range(2):
        parts.write(chunk, [str(chunk)])
    unlink = Path.unlink

    def die_at_the_second(path: Path, **options: bool) -> None:
        if path.name == "0000001.txt":
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", die_at_the_second)
        with pytest.raises(MachineError):
            parts.join()
    assert names(tmp_path / "out.parts") == {"0000001.txt", "plan.json"}
    output.unlink()
    assert opened(output, 2).num_done() == 1


def make_part_and_join(output: Path, chunk: int) -> None:
    parts = open_parts(output, PLAN, 4)
    assert parts is not None
    parts.write(chunk, [str(chunk)])
    parts.join()


@pytest.mark.slow
def test_processes_at_once_join_the_whole_once(tmp_path: Path) -> None:
    context, output = multiprocessing.get_context("spawn"), tmp_path / "out"
    processes = [context.Process(target=make_part_and_join, args=(output, chunk)) for chunk in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * 4
    assert output.read_text() == "0\n1\n2\n3\n"
    assert names(tmp_path) == {"out", "out.plan.json"}


def test_chunks_depend_on_the_number_of_lines_and_are_neither_tiny_nor_too_many() -> None:
    for num_lines in (0, 1, 255, 256, 10_000, 300_000, 5_000_000, 2_000_000_000):
        lines = chunk_lines(num_lines)
        assert 256 <= lines <= 16_384
        assert lines == 16_384 or num_lines / lines <= 1024


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_are_counted_and_read_by_ranges(tmp_path: Path, end: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(("\r\n".join(TEXT) + end).encode())
    digest, num_lines = digest_and_lines(path)
    assert num_lines == 4
    assert len(digest) == 64
    reader = LineReader(path)
    assert [reader.read(0, 1), reader.read(2, 1), reader.read(3, 1)] == [[TEXT[0]], [TEXT[2]], [TEXT[3]]]
    with pytest.raises(UserError, match=r"text: changed while it was read; put it back"):
        LineReader(path).read(3, 5)
    path.write_bytes(b"")
    assert digest_and_lines(path)[1] == 0


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path, mark = tmp_path / "text", "\ufeff"
    path.write_text(f"{mark}<2de> one\r\n{mark}two\n", encoding="utf-8")
    expected = ["<2de> one", f"{mark}two"]
    assert LineReader(path).read(0, 2) == list(numbered_lines(path)) == expected
    assert list(decoded_lines(path.open("rb"), "standard input")) == expected


@pytest.mark.parametrize("change", ["rewritten in place", "replaced", "removed"])
def test_a_file_that_changes_between_two_ranges_is_refused_whatever_its_length(tmp_path: Path, change: str) -> None:
    path, other = tmp_path / "text", tmp_path / "other"
    for file, text in ((path, "one\ntwo\n"), (other, "eno\nowt\n")):
        file.write_text(text)
        os.utime(file, (0, 0))
    reader = LineReader(path)
    assert reader.read(0, 1) == ["one"]
    if change == "rewritten in place":
        path.write_text("eno\nowt\n")
    elif change == "replaced":
        other.rename(path)
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"text: changed while it was read; put it back, or begin another output"):
        reader.read(1, 1)


@pytest.mark.parametrize(
    "compress",
    [gzip.compress, lzma.compress, bz2.compress, lambda text: pa.compress(text, "zstd", asbytes=True), zipped],
)
def test_a_compressed_file_is_told_with_what_unpacks_it(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "text.x").write_bytes(compress(b"one\ntwo\n" * 99))
    for read in (digest_and_lines, lambda path: LineReader(path).read(0, 1)):
        with pytest.raises(
            UserError, match=r"text\.x: is compressed; unpack it \(zcat, zstdcat, xzcat, bzcat or unzip\)"
        ):
            read(tmp_path / "text.x")


def test_what_is_no_text_is_told_by_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="standard input, line 2: not valid UTF-8"):
        list(decoded_lines([b"ok\n", b"\xff\n"], "standard input"))
    for read in (digest_and_lines, lambda path: LineReader(path).read(0, 1)):
        with pytest.raises(UserError, match="absent: cannot be read: No such file"):
            read(tmp_path / "absent")
    with pytest.raises(UserError, match=r"absent: cannot be read: No such file or directory$"):  # a model is no text
        digest_of(tmp_path / "absent")


@pytest.mark.parametrize("cut", [b"\xff\n", b"\xc3\n\xa4", b"\xe2\x82"])
def test_a_line_that_is_not_utf8_is_told_before_anything_is_translated(cut: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("zwölf €\n".encode() * 3)
    digest, num_lines = digest_and_lines(path)
    assert num_lines == 3
    assert digest == digest_of(path)
    with path.open("ab") as file:
        file.write(cut)
    with pytest.raises(UserError, match="text, line 4: not valid UTF-8"):
        digest_and_lines(path)


def test_a_pipe_is_not_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe: is a pipe or a device, but it is read more than once"):
        digest_and_lines(pipe)
