"""Long verbs show a bar with the time left on stderr if that is a terminal; standard output and files stay as they are."""

import os
import pty
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from running import NOT_INHERITED, Command, without

pytestmark = pytest.mark.slow

BAR = re.compile(r"(?m)([a-z][a-z ]+?) +━+")


def test_lines_that_are_typed_are_waited_for_with_a_word_and_those_of_a_file_without(
    command: Command, quick_client: Path, run: Path
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"twenty-one\n\x04")  # Ctrl-D
    process = subprocess.run(
        [quick_client, "translate", run], cwd=command.folder, stdin=theirs, capture_output=True, text=True, check=True,
        env=without(NOT_INHERITED),
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    assert "reading lines; Ctrl-D ends the input and starts the translation" in process.stderr
    assert process.stdout.count("\n") == 1
    assert "reading lines" not in command("translate", run, text="twenty-one\n")


def on_terminal(folder: Path, client: Path, *arguments: object, stdin: Path | None = None) -> tuple[str, str]:
    """Runs the client's command with stderr on a terminal; returns standard output, and all that the terminal got."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                shown.extend(part)
        except OSError:  # how a terminal says that nobody writes to it any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with open(stdin or os.devnull, "rb") as given:
        process = subprocess.Popen(
            [client, *map(str, arguments)], cwd=folder, stdin=given, stdout=subprocess.PIPE, stderr=theirs,
            env={**without(NOT_INHERITED), "TERM": "xterm", "COLUMNS": "120"},
        )  # fmt: skip
        os.close(theirs)
        out, _ = process.communicate(timeout=300)
    reader.join(60)
    os.close(ours)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode(errors="replace"))
    assert process.returncode == 0, text
    return out.decode(), text


@pytest.fixture(scope="module")
def run(train_small: Callable[..., Path]) -> Path:
    return train_small("bars")


@pytest.mark.parametrize(
    ("arguments", "bar"),
    [
        (("prepare", "small.yaml", "data.prepared={out}"), "train"),
        (("evaluate", "{run}"), "translating"),
        (("average", "{run}", "--output", "{out}"), "averaging"),
        (("verify", "{run}"), "verifying"),
        (("export", "{run}", "{out}", "--to", "marian"), "exporting"),
        (("translate", "{run}", "--input", "valid.en", "--output", "{out}"), "translating"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_long_verb_shows_a_bar_on_a_terminal_and_the_same_output_as_without(
    command: Command, quick_client: Path, run: Path, tmp_path: Path, arguments: tuple[str, ...], bar: str
) -> None:
    given = [[part.format(run=run, out=tmp_path / where) for part in arguments] for where in ("a", "b")]
    text = command.folder / "valid.en"
    out, shown = on_terminal(command.folder, quick_client, *given[0], stdin=text)
    assert bar in BAR.findall(shown), shown
    assert "━" not in out
    plain = command(*given[1], text=text.read_text(encoding="utf-8"))
    assert "━" not in plain
    assert plain.startswith(out.replace(str(tmp_path / "a"), str(tmp_path / "b")))
