"""The pages that teach are run, command by command: docs/finetuning.md and docs/tutorial.md.

Of such a page, from its first line to its last and in one folder,

    ```yaml     that begins with `# NAME.yaml` is written to the file NAME.yaml;
    ```console  is run by bash: the lines after `$ `, and those after `> ` that go on with them. The other lines are what
                it prints: each must be part of the output, in that order; `...` in one stands for anything;
    ```python   is run, in one process with those before it.

Indented blocks and other fences are only to be read.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_server import quick_command
from running import NOT_INHERITED, without

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("finetuning.md", "tutorial.md")
SECONDS_OF_A_BLOCK = 900


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that the text begins at."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], text[: match.start(2)].count("\n") + 1) for match in found]


def script_of(block: Block) -> str:
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith(("$ ", "> ")))


def printed_by(block: Block) -> re.Pattern[str]:
    """What the output must hold: the lines that are no commands, with anything between them."""
    lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith(("$ ", "> "))]
    return re.compile(".*".join(re.escape(line.strip()).replace(r"\.\.\.", ".*?") for line in lines), re.DOTALL)


def run_console(block: Block, folder: Path, path: str) -> None:
    """`path`: the PATH to find commands on."""
    environment = {"OMP_NUM_THREADS": "1", **without(NOT_INHERITED), "PATH": path}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script_of(block)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_OF_A_BLOCK,
    )  # fmt: skip
    assert done.returncode == 0, f"line {block.line}: exit code {done.returncode}\n{done.stdout}"
    assert printed_by(block).search(done.stdout), f"line {block.line}: it printed\n{done.stdout}"


def write_file(block: Block, folder: Path) -> None:
    if name := re.match(r"# (\S+\.yaml)\n", block.text):
        (folder / name[1]).write_text(block.text, encoding="utf-8")


def test_a_command_that_fails_and_words_that_are_not_printed_are_noticed(tmp_path):
    path = os.environ["PATH"]
    run_console(Block("console", "$ echo 'a 12 b'\na ... b\n$ echo c\nc\n", 1), tmp_path, path)
    for text in ("$ false | cat\n$ echo a\n", "$ echo a\nb\n", "$ echo a; echo b\nb\na\n"):
        with pytest.raises(AssertionError, match=r"^line 7: "):
            run_console(Block("console", text, 7), tmp_path, path)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_the_page_runs_and_prints_what_it_says(name, tmp_path, monkeypatch):
    folder, commands = tmp_path / "page", tmp_path / "bin"
    folder.mkdir()
    commands.mkdir()
    monkeypatch.chdir(folder)
    blocks, names = blocks_of(DOCS / name), {"__name__": "page"}
    assert any(block.language in ("console", "python") for block in blocks)
    with quick_command(commands, without(NOT_INHERITED)) as path:
        for block in blocks:
            if block.language == "yaml":
                write_file(block, folder)
            elif block.language == "console":
                run_console(block, folder, path)
            elif block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.text, str(DOCS / name), "exec"), names)
