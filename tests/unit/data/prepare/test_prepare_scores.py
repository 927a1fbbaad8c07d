"""Scores of pairs in `prepare`: columns of tables, files beside text, and those that do not fit."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_helpers import (
    PAIRS,
    TEXT,
    config_in,
    report_of,
    rows_in,
)

from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.errors import DataError


def score_lines(count: int) -> str:
    return "".join(f"{number / 100:g}\n" for number in range(count))


def write_table(folder: Path, kind: str, missing: tuple[int, ...] = ()) -> str:
    """A table of 100 pairs with scores 0, 0.01 ... 0.99, some of them missing; returns the name of the column."""
    rows: list[dict[str, Any]] = [{"en": en, "de": de} for en, de in PAIRS[:100]]
    for number, row in enumerate(rows):
        row["laser"] = None if number in missing else number / 100
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "t.parquet", row_group_size=30)
    elif kind == "jsonl":
        (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        mark = "\t" if kind == "tsv" else ","
        cells = (["" if cell is None else str(cell).replace(",", "") for cell in row.values()] for row in rows)
        head = "" if kind == "tsv" else "en,de,laser\n"
        (folder / f"t.{kind}").write_text(head + "".join(f"{mark.join(row)}\n" for row in cells), encoding="utf-8")
    return "2" if kind == "tsv" else "laser"


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_scores_are_a_column_of_any_table(tmp_path: Path, kind: str):
    column = write_table(tmp_path, kind)
    train = {"path": f"t.{kind}", "filters": {"scores": {column: 0.25}}}
    assert rows_in(config_in(tmp_path, PAIRS[:9], {}, train=train)) == [*range(25, 100)]


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_a_missing_score_of_a_table_counts_as_below_the_threshold(tmp_path: Path, kind: str):
    column = write_table(tmp_path, kind, missing=(30, 40))
    config = config_in(tmp_path, PAIRS[:9], {}, train={"path": f"t.{kind}", "filters": {"scores": {column: 0.25}}})
    assert rows_in(config) == [row for row in range(25, 100) if row not in (30, 40)]
    assert report_of(config)["train"]["dropped"]["scores"] == 27


def test_a_score_that_is_a_word_is_named_with_its_table(tmp_path: Path):
    write_table(tmp_path, "csv")
    path = tmp_path / "t.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(",0.02\n", ",good\n"), encoding="utf-8")
    config = config_in(tmp_path, PAIRS[:9], {}, train={"path": "t.csv", "filters": {"scores": {"laser": 0.25}}})
    with pytest.raises(DataError, match=r"t\.csv: column laser: score 3 is 'good'; expected a number a line"):
        prepare(config)


def test_scores_are_a_file_beside_text_files_and_part_of_the_recipe(tmp_path: Path):
    (tmp_path / "bicleaner.txt").write_text(score_lines(100))
    config = config_in(tmp_path, PAIRS[:100], {}, train={**TEXT, "filters": {"scores": {"bicleaner.txt": 0.9}}})
    assert rows_in(config) == [*range(90, 100)]
    before = prepared_folder(config)
    (tmp_path / "bicleaner.txt").write_text(score_lines(100).replace("0.95", "0.05"))
    assert prepared_folder(config) != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            score_lines(99),
            r"bicleaner\.txt: ends after 99 scores, but there are more pairs; expected a number a line",
        ),
        (score_lines(101), r"bicleaner\.txt: more lines than .*train\.de has pairs, 100"),
        (score_lines(100).replace("0.07", "good"), r"bicleaner\.txt: score 8 is 'good'; expected a number a line"),
        (score_lines(100).replace("0.07", ""), r"bicleaner\.txt: score 8 is ''; expected a number a line"),
    ],
    ids=["too few", "too many", "a word", "an empty line"],
)
def test_scores_that_do_not_fit_are_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "bicleaner.txt").write_text(text)
    config = config_in(tmp_path, PAIRS[:100], {}, train={**TEXT, "filters": {"scores": {"bicleaner.txt": 0.5}}})
    with pytest.raises(DataError, match=message):
        prepare(config)
