"""The points of a sweep, from a YAML file:

    grid:                                    every combination of these
      optimizer.learning_rate: [1e-3, 3e-4]
      model.dropout: [0.1, 0.3]
    list:                                    each of these with every combination
      - {model.num_heads: 1, model.d_model: 512}
      - {model.num_heads: 16}
    max_running: 4                           tasks of the job array that run at once

Either alone is allowed. A point becomes a full configuration, as if its settings were given on the command line.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import Config
from dist_transformer.config.yaml12 import as_written
from dist_transformer.config.yaml_positions import Marked, read_yaml
from dist_transformer.errors import ConfigError

MOST_POINTS = 1000
"""Limit of points. Slurm's own limit is one task more, unless the site has raised it (MaxArraySize)."""

Point = Mapping[str, tuple[Any, str]]
"""Settings by their dotted keys: the value, and the line of the file."""

_KEYS = ("grid", "list", "max_running")


@dataclass(frozen=True)
class Sweep:
    """A sweep file."""

    text: str
    points: Sequence[Point]
    max_running: int | None

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of each point."""
        return [{key: value for key, (value, _) in point.items()} for point in self.points]


def read_sweep(path: Path) -> Sweep:
    """The points of a sweep file, in the order of their tasks: the list, and for each entry the grid, last key fastest.

    Raises:
        ConfigError: all problems of the file, each with its line.
    """
    marked = read_yaml(path)
    if problems := [*_problems(marked)]:
        raise ConfigError(problems)
    grid, entries = marked.values.get("grid", {}), marked.values.get("list", [{}])
    axes = [[(key, (value, marked.place(("grid", key)))) for value in values] for key, values in grid.items()]
    listed = [
        {key: (value, marked.place(("list", index, key))) for key, value in entry.items()}
        for index, entry in enumerate(entries)
    ]
    combined = itertools.islice(itertools.product(listed, *axes), MOST_POINTS + 1)
    points = [{**entry, **dict(settings)} for entry, *settings in combined]
    sweep = Sweep(path.read_text(encoding="utf-8"), points, marked.values.get("max_running"))
    if problems := [*_point_problems(sweep.settings)]:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return sweep


def load_points(path: Path, overrides: list[str], sweep: Sweep) -> list[Config]:
    """The configuration of each point, checked like any other.

    Raises:
        ConfigError: the problems of all points; one that every point has is reported once.
    """
    configs, found = [], dict[int, list[str]]()
    for task, point in enumerate(sweep.points):
        try:
            configs.append(load_config(path, overrides, settings=point))
        except ConfigError as error:
            found[task] = error.problems
    if found:
        raise ConfigError(grouped_by_reason(found, len(sweep.points)))
    return configs


def grouped_by_reason(found: Mapping[int, Sequence[str]], num_points: int) -> list[str]:
    """The problems of all points, each prefixed with the tasks that have it unless all have it."""
    tasks_with: dict[str, list[int]] = {}
    for task, problems in found.items():
        for problem in problems:
            tasks_with.setdefault(problem, []).append(task)
    return [
        problem if len(tasks) == num_points else f"task{'s' if len(tasks) > 1 else ''} {ranges(tasks)}: {problem}"
        for problem, tasks in tasks_with.items()
    ]


def ranges(tasks: Sequence[int]) -> str:
    """Formats (0, 1, 2, 5) as 0-2,5."""
    found: list[list[int]] = []
    for task in tasks:
        if found and found[-1][1] == task - 1:
            found[-1][1] = task
        else:
            found.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _problems(marked: Marked) -> Iterator[str]:
    grid, entries = marked.values.get("grid", {}), marked.values.get("list", [])
    for key in marked.values:
        if key not in _KEYS:
            yield f"{marked.place((key,))}: {key}: no such key in a sweep file; known: {', '.join(_KEYS)}"
    if not grid and not entries:
        yield f"{marked.place(())}: a sweep needs `grid` or `list`"
    running = marked.values.get("max_running")
    if running is not None and (not isinstance(running, int) or isinstance(running, bool) or running < 1):
        yield f"{marked.place(('max_running',))}: max_running: expected a whole number from 1, got {running!r}"
    if not isinstance(grid, dict):
        yield f"{marked.place(('grid',))}: grid: expected `section.key: [value, value]` lines"
        grid = {}
    if not isinstance(entries, list) or (not entries and "list" in marked.values):
        yield f"{marked.place(('list',))}: list: expected `- {{section.key: value}}` lines"
        entries = []
    for key, values in grid.items():
        place = f"{marked.place(('grid', key))}: grid"
        yield from _key_problems(key, place)
        if not isinstance(values, list) or not values:
            yield f"{place}: {key}: expected a list of values, got {as_written(values)!r}"
    for index, entry in enumerate(entries):
        place = f"{marked.place(('list', index))}: list"
        if not isinstance(entry, dict):
            yield f"{place}: expected {{section.key: value}}, got {as_written(entry)!r}"
            continue
        for key in entry:
            place = f"{marked.place(('list', index, key))}: list"
            yield from _key_problems(key, place)
            if key in grid:
                yield f"{place}: {key}: stands in the grid too; keep one of them"


def _key_problems(key: str, place: str) -> Iterator[str]:
    section, dot, _ = key.partition(".")
    if not dot or not all(key.split(".")) or "=" in key:
        yield f"{place}: {key}: expected section.key: optimizer.learning_rate"
    elif section == "slurm" or key in ("run.name", "run.root"):
        yield f"{place}: {key}: is the same for all points: they are one job array in one folder; remove it here"


def _point_problems(points: Sequence[dict[str, Any]]) -> Iterator[str]:
    if len(points) > MOST_POINTS:
        yield f"more than {MOST_POINTS} points, which no job array takes; make several sweeps of it"
        return
    first: dict[str, int] = {}
    for task, point in enumerate(points):
        same = json.dumps(point, sort_keys=True)
        if same in first:
            text = ", ".join(f"{key}={as_written(value)}" for key, value in point.items())
            yield f"tasks {first[same]} and {task} are the same point ({text}); keep one"
        first.setdefault(same, task)
