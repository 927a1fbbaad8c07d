"""Tables as they are printed."""

import sys

import pytest

from dist_transformer.format import print_table, table


def test_a_table_has_tabs_and_is_aligned_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, rows = ["name", "count"], [["a", "1"], ["longer", "22"]]
    print_table(head, rows)
    assert capsys.readouterr().out == "name\tcount\na\t1\nlonger\t22\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(head, rows, best=[1, None])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [head, ["a", "1", "*"], ["longer", "22"]]
    assert len({*map(len, lines)}) == 1


def test_words_are_at_the_left_and_numbers_at_the_right_and_nothing_is_either() -> None:
    head, rows = ["name", "word", "count"], [["a", "-", "-"], ["b", "longer", "1,000"]]
    assert table(head, rows) == ["name  word    count", "a     -           -", "b     longer  1,000"]
    assert table(head, rows, is_markdown=True) == [
        "| name | word   | count |",
        "| ---- | ------ | ----: |",
        "| a    | -      |     - |",
        "| b    | longer | 1,000 |",
    ]
