"""The cross-entropy filter: of scored pairs those of the worst scores are dropped (Junczys-Dowmunt, 2018)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_transformer.decoding.sharded_files import numbered_lines
from dist_transformer.errors import UserError
from dist_transformer.files import replacing, write_json


def kept_pairs(scores: Sequence[float], drop: float) -> list[int]:
    """Returns the indices, ascending, of all pairs but the `drop` share of lowest scores; of equal ones the first stay."""
    worst_first = sorted(range(len(scores)), key=lambda index: (scores[index], -index))
    return sorted(worst_first[int(len(scores) * drop) :])


def filter_files(source: Path, target: Path, scores: Path, drop: float, folder: Path) -> None:
    """Writes the kept lines of two files as `folder`/source and target, then counts.json.

    Raises UserError if the files differ in their numbers of lines, or a line of `scores` is not numbers.
    """
    means = [*_means(scores)]
    kept = kept_pairs(means, drop)
    for path, name in ((source, "source"), (target, "target")):
        wanted, num_lines = {*kept}, 0
        with replacing(folder / name) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as out:
            for num_lines, line in enumerate(numbered_lines(path), start=1):
                if num_lines - 1 in wanted:
                    out.write(f"{line}\n")
        if num_lines != len(means):
            raise UserError(f"{path} has {num_lines} lines, {scores} {len(means)}: expected a score for each")
    write_json(folder / "counts.json", {"lines": len(means), "kept_lines": len(kept)})


def _means(scores: Path) -> Iterator[float]:
    """Yields the mean of the numbers of each line: of the log-probabilities of a sentence's tokens."""
    for number, line in enumerate(numbered_lines(scores), start=1):
        try:
            values = [float(word) for word in line.split()]
            yield sum(values) / len(values)
        except (ValueError, ZeroDivisionError):
            raise UserError(f"{scores}, line {number}: {line[:40]!r}: expected a number or several") from None
