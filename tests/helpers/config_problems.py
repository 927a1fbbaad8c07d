"""The problems that a configuration is refused with."""

from pathlib import Path

import pytest

from dist_transformer.config.loading import load_config
from dist_transformer.errors import ConfigError


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    assert caught.value.exit_code == 2
    return caught.value.problems


def one_problem_of(path: Path, *overrides: str) -> str:
    [problem] = problems_of(path, *overrides)
    return problem
