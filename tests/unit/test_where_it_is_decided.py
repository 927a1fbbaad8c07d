"""The quiz of docs/architecture.md: each question has a file that exists and holds the definition that answers it."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Where is it decided?")[1].split("\n## ")[0]
ANSWERS = re.findall(r"^\| (.+) \| `([\w/.]+)` \| `(\w+)` \|$", SECTION, re.MULTILINE)


def test_there_are_twenty_questions_or_more():
    assert len({question for question, _, _ in ANSWERS}) >= 20
    assert len(ANSWERS) + 2 == SECTION.count("\n| ") + SECTION.count("\n|--"), "a row has another form"


@pytest.mark.parametrize(("question", "file", "name"), ANSWERS, ids=[question for question, _, _ in ANSWERS])
def test_the_file_holds_the_definition(question, file, name):
    tree = ast.parse((REPOSITORY / "dist_transformer" / file).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert name in defined, f"{question}: {file} defines {sorted(defined)}"


@pytest.mark.parametrize(("names", "file"), re.findall(r"((?:`\w+`(?:,| and)? )+)of `([\w/]+\.py)`", PAGE))
def test_the_file_has_the_names_that_the_page_names_of_it(names, file):
    path = next(path for folder in ("dist_transformer", "") if (path := REPOSITORY / folder / file).is_file())
    text = path.read_text(encoding="utf-8")
    assert [name for name in re.findall(r"\w+", names) if name != "and" and not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("path", sorted({*re.findall(r"`([a-z_]+/[\w/]+\.py)`", PAGE)}))
def test_every_file_that_the_page_names_is_there(path):
    assert (REPOSITORY / "dist_transformer" / path).is_file() or (REPOSITORY / path).is_file()
