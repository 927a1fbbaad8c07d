"""rerank: chooses from n-best lists by scores that another program made."""

import re
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import write_utf8
from dist_transformer.errors import UserError

_LINE = re.compile(r"(\d+) \|\|\| (.*) \|\|\| log_probability= .*\n(-inf|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def rerank_command(
    n_best: Annotated[Path, typer.Argument(help="What translate --n-best wrote.", show_default=False)],
    scores: Annotated[
        Path, typer.Argument(help="A number for each of its lines, higher is better.", show_default=False)
    ],
) -> None:
    """Print the translation of each line that has the highest score in a file, of equals the first."""
    from dist_transformer.decoding.sharded_files import numbered_lines

    best: list[tuple[float, str]] = []
    for number, (line, score) in enumerate(zip_longest(numbered_lines(n_best), numbered_lines(scores)), start=1):
        if (found := _LINE.fullmatch(f"{line}\n{str(score).strip()}")) is None:
            form = "NUMBER ||| TEXT ||| log_probability= ..."
            raise UserError(
                f"line {number}: expected {form} in {n_best}, got {line!r}; a number in {scores}, got {score!r}"
            )
        candidate = float(found[3]), found[2]
        if found[1] == str(len(best)):
            best.append(candidate)
        elif found[1] == str(len(best) - 1):
            best[-1] = max(best[-1], candidate, key=lambda each: each[0])
        else:
            raise UserError(
                f"{n_best}, line {number}: expected {len(best)} as the next number, got {found[1]}: translate "
                "numbers the lines of one input from 0, without gaps; rerank each list by itself; those of several models for "
                "one input are merged by: sort -n -s LISTS"
            )
    write_utf8()
    for _, text in best:
        print(text)
