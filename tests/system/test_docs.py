"""What the documents say is there: links, commands, settings, make targets and tests."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from dist_transformer.cli.main import app
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.config.yaml_positions import parse_yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [
        *REPOSITORY.glob("*.md"),
        *(p for d in ("docs", "slurm", "benchmarks") for p in (REPOSITORY / d).rglob("*.md")),
    ]
)
SCRIPTS = [*REPOSITORY.glob("launch/*.sh"), *REPOSITORY.glob("slurm/*.sbatch"), *REPOSITORY.glob("configs/**/*.yaml")]
GROUP = typer.main.get_command(app)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_link_to_a_file_leads_to_one(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)):
        assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_test_that_is_named_exists(page):
    defined = {
        name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for name in re.findall(r"`(test_\w+)`", text_of(page)):
        assert name in defined, f"{page.name}: {name}"


def commands_of(page: Path) -> list[list[str]]:
    """Arguments of every `dist-transformer ...` at the start of a line or of an inline code span."""
    found = re.findall(r"(?:^\s*(?:\$ )?|#\s+|`)dist-transformer ([a-z][^`\n]*)", text_of(page), re.MULTILINE)
    return [shlex.split(line.split("  #")[0].split(" < ")[0].split(" > ")[0], comments=True) for line in found]


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_command_has_its_verb_options_and_settings(page):
    for arguments in commands_of(page):
        command = GROUP
        while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
            command = command.commands[arguments.pop(0)]
        assert command is not GROUP, f"{page.name}: no verb in {arguments}"
        options = {name for parameter in command.params for name in parameter.opts}
        for argument in arguments:
            if argument.startswith("--"):
                assert argument.split("=")[0] in options, f"{page.name}: {command.name} has no {argument}"
            elif re.fullmatch(r"[a-z]+\.[a-z_0-9]+=.*", argument):
                section, key = argument.split("=")[0].split(".")
                model = Config.model_fields[section].annotation
                assert key in model.model_fields, f"{page.name}: no setting {section}.{key}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", text_of(REPOSITORY / "Makefile"), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)`", text_of(page)) + re.findall(
        r"^    make ([a-z-]+)", text_of(page), re.MULTILINE
    )
    assert set(named) <= targets


def test_the_first_screen_of_the_readme_names_both_commands():
    first_screen = "\n".join(text_of(REPOSITORY / "README.md").splitlines()[:25])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_ci_calls_the_test_command_of_the_readme():
    assert "make test" in text_of(REPOSITORY / ".ci" / "run")


COMING_FROM = REPOSITORY / "docs" / "coming_from.md"


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", text_of(COMING_FROM), re.MULTILINE | re.DOTALL))
def test_the_converted_recipes_are_valid(block, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(block, encoding="utf-8")
    config = load_config(path, check_files=False)
    assert config.run.name.startswith("from-")


def cells_of_ours() -> list[str]:
    rows = re.findall(r"^\| (.*) \|$", text_of(COMING_FROM), re.MULTILINE)
    return [re.split(r"(?<!\\) \| ", row)[-1] for row in rows]


@pytest.mark.parametrize("cell", [cell for cell in cells_of_ours() if ": " in cell])
def test_the_tables_give_their_settings_values_that_these_take(cell):
    """`key: value` without a section is of the section named before it; 2N, F x G and ... stand for a value."""
    section = ""
    for named, key, value in re.findall(r"`(?:([a-z]+)\.)?([a-z_]+)(?:: ([^`]*))?`", cell):
        section = named or section
        if value and section in Config.model_fields and not re.search(r"[A-Z]|\.\.\.", value):
            assert problems_of_value(section, key, value) == []


def problems_of_value(section: str, key: str, value: str) -> list[str]:
    model = Config.model_fields[section].annotation
    try:
        model.model_validate({key: parse_yaml(f"value: {value}", "").values["value"]})
    except ValidationError as error:
        return [f"{section}.{key}: {each['msg']}" for each in error.errors() if each["loc"][:1] == (key,)]
    return []


def test_the_tables_of_options_name_settings_that_exist():
    named = re.findall(r"`([a-z]+)\.([a-z_]+)(?:: [^`]*)?`", text_of(COMING_FROM))
    assert len(named) > 50
    for section, key in named:
        assert section in Config.model_fields, f"{section}.{key}"
        assert key in Config.model_fields[section].annotation.model_fields, f"{section}.{key}"


def test_the_table_of_translating_names_options_that_exist():
    """An option without a verb before it is one of translate."""
    table = text_of(COMING_FROM).split("\n## Translating\n")[1].split("\n## ")[0]
    cells = [re.split(r"(?<!\\) \| ", row)[-1] for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)]
    spans = [span.split() for cell in cells for span in re.findall(r"`([^`]+)`", cell) if "--" in span]
    assert len(spans) > 10
    for words in spans:
        command = GROUP.commands[words[0] if words[0] in GROUP.commands else "translate"]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words
