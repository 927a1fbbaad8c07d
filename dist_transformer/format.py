"""Durations and tables as text, and progress as a bar."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Show = Callable[[str, float, float | None], None]
"""Takes the name of a stage, how much of it is done, and how much there is; None: not known, or as before."""


@contextmanager
def progress_bar() -> Iterator[Show]:
    """Yields a function that shows progress, with the time left, on stderr if it is a terminal; else it does nothing."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    hidden, is_shown = not sys.stderr.isatty(), sys.stdout.isatty()  # what is printed to a file must stay in the file
    with Progress(console=Console(stderr=True), disable=hidden, transient=True, redirect_stdout=is_shown) as bar:

        def show(stage: str, done: float, total: float | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[int | None] = ()) -> None:
    """Prints a table: aligned on a terminal, with a star at the cell number `best[row]` of a row; else lines with tabs."""
    if not sys.stdout.isatty():
        print(*("\t".join(row) for row in [head, *rows]), sep="\n")
        return
    numbers = best or [None] * len(rows)
    stars = [[f"{cell} *" if place == number else cell for place, cell in enumerate(row)]
             for row, number in zip(rows, numbers, strict=True)]  # fmt: skip
    print(*table(head, stars), sep="\n")


def duration(seconds: float | None) -> str:
    """Returns "12 s", "3 min 20 s", "2 h 05 min" or "3 d 4 h"; "-" for None."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, is_markdown: bool = False) -> list[str]:
    """Returns the lines of a table, as wide as one another; columns of words are aligned at the left, others at the right.

    "-", for nothing, is a word among words and a number among numbers. In Markdown the table is aligned as text too.
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = zip(*rows, strict=True) if rows else ((),) * len(header)
    to_left = [{cell[:1].isalpha() for cell in column if cell != "-"} == {True} for column in columns]
    if is_markdown:
        rule = ["-" * width if left else "-" * (width - 1) + ":" for width, left in zip(widths, to_left, strict=True)]
        lines.insert(1, rule)
    begin, between, end = ("| ", " | ", " |") if is_markdown else ("", "  ", "")
    forms = [f"{'<' if left else '>'}{width}" for width, left in zip(widths, to_left, strict=True)]
    padded = ([format(cell, form) for cell, form in zip(line, forms, strict=True)] for line in lines)
    return [begin + between.join(cells) + end for cells in padded]
