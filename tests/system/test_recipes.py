"""The table of recipes: its figures are those of the records that it links, and it leaves out no configuration."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGE = (DOCS / "recipes.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)#?([^)]*)\)")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| [")]
NOT_RUN = "not yet run: needs GPUs"
SIGNATURES = dict(re.findall(r"^- \((\w)\) (.*(?:\n  .*)*)", PAGE, re.MULTILINE))


def anchor(heading: str) -> str:
    """The name by which GitHub links a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def record_of(row: list[str]) -> str:
    """The text that the last column links: of a section down to the next heading of its rank or a higher one."""
    match = LINK.search(row[-1])
    assert match, row[-1]
    text = (DOCS / match[2]).read_text(encoding="utf-8")
    if not match[3]:
        return text
    headings = list(re.finditer(r"^(#+) (.+)$", text, re.MULTILINE))
    (start,) = [h for h in headings if anchor(h[2]) == match[3]]
    ends = [h.start() for h in headings if h.start() > start.start() and len(h[1]) <= len(start[1])]
    return text[start.start() : ends[0] if ends else len(text)]


def names(rows: list[list[str]]) -> list[str]:
    return [LINK.search(row[0])[1] for row in rows]


def test_every_configuration_has_a_row():
    assert {path.stem for path in (REPOSITORY / "configs").glob("*.yaml")} <= set(names(ROWS))
    assert all(len(row) == 5 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_every_figure_of_a_row_stands_in_its_record(row):
    record = " ".join(record_of(row).split())
    for figure in re.findall(r"\d+\.\d+", row[2]):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", record), f"{figure} is not in {row[-1]}"
    for time in re.findall(r"(?:\d+|two) (?:minutes|seconds|hours)", row[3]):
        assert time in record, f"{time} is not in {row[-1]}"
    if NOT_RUN in row[2]:
        assert row[3] == "-"
    else:
        assert re.search(r"BLEU \d+\.\d+", row[2])
        assert row[3]


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_every_score_has_the_signature_of_its_record(row):
    if "BLEU" not in row[2]:
        return
    letter = re.search(r"\((\w)\)", row[2])[1]
    record = record_of(row).replace("\\|", "|")
    signatures = re.findall(r"`([^`]*:[^`]*)`", SIGNATURES[letter])
    wanted = signatures if "chrF" in row[2] else signatures[:1]
    assert wanted
    assert all(signature in record for signature in wanted)


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_the_command_of_a_row_trains_what_the_row_links(row):
    link = Path(LINK.search(row[0])[2])
    page = (DOCS / link).read_text(encoding="utf-8")
    if link.suffix == ".yaml":
        assert link.name in row[1] or row[1] == "`make demo`"
    else:
        assert f"$ {row[1].strip('`')}\n" in page
