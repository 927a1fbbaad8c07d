"""Any verb with any options on any paths: done, or refused with a message; never a traceback."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import typer
from forked_command import bounded, must_end_in_a_message
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.cli.main import app

pytestmark = pytest.mark.slow

NOT_RUN = ("demo", "ui", "preflight")
"""What would train, serve or measure, given anything that it takes."""
ODD_PATHS = [
    *("missing", "missing/below", "", ".", "folder", "empty", "garbage", "text.en", "small.yaml", "bad.yaml"),
    *("loop", "loop/x", "dangling"),
    *("empty/below", "x" * 300, "a\nb", "a\0b", "é", "\udcff", "-", "folder/", "numbers.json", "list.json", "link-to-folder"),
]  # fmt: skip
"""Within the working folder, all of them: some verbs write."""
NUMBERS = ["0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e400", "x", "", "0x10", "1e-320", "1,2", "1,,2", "½"]
LARGE = ["2147483648", "9" * 400, "99999999999999999999"]
STARTS_PROCESSES = ("--ranks", "--processes")
WORDS = [
    "torch",
    "ctranslate2",
    "marian",
    "marian-npz",
    "split",
    "cut",
    "raise",
    "both",
    "none",
    "train",
    "validation",
    "test",
    "a=b",
    "int8",
]


def verbs() -> Iterator[tuple[str, ...]]:
    def below(command, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
        commands = getattr(command, "commands", None)
        if commands is None:
            yield name, command
        for each in commands or ():
            yield from below(commands[each], (*name, each))

    return below(typer.main.get_command(app), ())


VERBS = {" ".join(name): command for name, command in verbs() if name[0] not in NOT_RUN}


@st.composite
def command_lines(draw, verb: str, paths: list[str]) -> list[str]:
    """The arguments of a verb: mostly paths where it takes arguments, anything for its options."""
    line = verb.split()
    for parameter in VERBS[verb].params:
        if parameter.param_type_name == "argument":
            most = 3 if parameter.nargs == -1 else 1
            line += draw(
                st.lists(
                    st.sampled_from([*paths, *WORDS]), min_size=min(most, 1 + most // 3 - (most == 3)), max_size=most
                )
            )
    options = [
        each
        for each in VERBS[verb].params
        if each.param_type_name == "option" and each.opts[-1] not in ("--help", "-f")
    ]
    for option in draw(st.lists(st.sampled_from(options), max_size=3)) if options else []:
        name = option.opts[-1]
        values = [*paths, *NUMBERS, *WORDS, *([] if name in STARTS_PROCESSES else LARGE)]
        line += [name] if getattr(option, "is_flag", False) else [name, draw(st.sampled_from(values))]
    return line


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands run; without programs, so that none finds Slurm."""
    folder, before = tmp_path_factory.mktemp("lines"), Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        (folder / "here").mkdir()
        os.chdir(folder / "here")
        yield folder
        os.chdir(before)


def fill(folder: Path) -> None:
    """`folder` with nothing but what ODD_PATHS names."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / "folder").mkdir()
    (folder / "folder" / "file").write_bytes(b"x")
    (folder / "empty").touch()
    (folder / "garbage").write_bytes(bytes(range(256)) * 8)
    (folder / "text.en").write_text("One line.\nAnd another one.\n", encoding="utf-8")
    (folder / "small.yaml").write_text(
        "run: {name: fuzz}\ndata: {train: {source: text.en, target: missing}}\n", encoding="utf-8"
    )
    (folder / "bad.yaml").write_text("run: [", encoding="utf-8")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing-here")
    (folder / "link-to-folder").symlink_to("folder")
    (folder / "numbers.json").write_text('{"a": 1, "medians": {"x": NaN}}', encoding="utf-8")
    (folder / "list.json").write_text("[1, 2", encoding="utf-8")


@pytest.mark.parametrize("verb", VERBS)
def test_any_paths_and_options_are_taken_or_refused_with_a_message(working_folder, verb):
    @bounded(15)
    @given(command_lines(verb, ODD_PATHS), st.sampled_from(["", "One line.\n", "\udcff\n"]))
    def check(line: list[str], text: str) -> None:
        fill(Path.cwd())
        must_end_in_a_message(*line, text=text)

    with mock.patch.dict("dist_transformer.data.sources.demo_corpus.PAIRS_OF_SPLIT", train=3, validation=3, test=3):
        check()


@pytest.mark.parametrize("verb", NOT_RUN)
def test_no_verb_takes_an_option_that_is_none(working_folder, verb):
    fill(Path.cwd())
    must_end_in_a_message(verb, "--ranks", "x")
    must_end_in_a_message(verb, "--port", "99999999")
    must_end_in_a_message(verb, "--folder", "garbage/x", "--ranks", "0")
