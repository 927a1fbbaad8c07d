"""Paths that cannot be read for a moment, or for good."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_transformer import files

FOR_GOOD = 10**6


@contextmanager
def stuttering(number: int, names: Collection[str], times: int = 1) -> Iterator[None]:
    """In its block, opens, looks at and listings of paths with one of these names fail so many times each."""
    left: dict[Any, int] = {}

    def failing(method: Any) -> Any:
        def act(path: Path, *arguments: Any, **named: Any) -> Any:
            if path.name in names and left.setdefault((path, method), times) > 0:
                left[path, method] -= 1
                raise OSError(number, os.strerror(number), str(path))
            return method(path, *arguments, **named)

        return act

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PAUSES_SECONDS", (0.0, 0.0))
        for method in ("open", "stat", "iterdir"):
            patch.setattr(Path, method, failing(getattr(Path, method)))
        yield
