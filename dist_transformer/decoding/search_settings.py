"""Settings of a search for translations: those of the model's run, with what a user gives in their place."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_transformer.config.loading import suggestion, value_problem
from dist_transformer.config.schema import BeamConfig, DecodingConfig
from dist_transformer.errors import ConfigError
from dist_transformer.run.read_run import read_run


def search_settings(model: Path, **given: Any) -> DecodingConfig:
    """Settings of the run of `model`, if it is a run folder, overridden by `given` values that are not None. Raises
    ConfigError: settings are invalid, or exclude each other."""
    base = read_run(model)[0].decoding if (model / "config.yaml").is_file() else BeamConfig()
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        settings = DecodingConfig(**{**base.model_dump(), **changes})
        problems = list(_problems(settings))
    except ValidationError as error:
        problems = [_explained(str(problem["loc"][0]), problem) for problem in error.errors()]
    if problems:
        raise ConfigError(problems, "the search cannot be done as it is asked for:")
    return settings


def noting_tags(model: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines, and warns at their end if none begins with a tag, as each training sentence of a run `model` did."""
    corpora = read_run(model)[0].data.training_corpora() if (model / "config.yaml").is_file() else {}
    first = tuple(sorted({tag for corpus in corpora.values() for tag in corpus.tags[:1]}))
    is_bare = bool(corpora) and all(corpus.tags for corpus in corpora.values())
    for line in lines:
        is_bare = is_bare and not line.startswith(first)
        yield line
    if is_bare:
        print(f"warning: no line begins with {' or '.join(first)}, as every training sentence did", file=sys.stderr)


def _explained(name: str, problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting{suggestion(name, DecodingConfig.model_fields)}"
    return f"{name}: {value_problem((name,), problem)}"


def _problems(settings: DecodingConfig) -> Iterator[str]:
    if settings.sampling:
        return
    if settings.n_best > settings.beam_size:
        yield (
            f"n_best: {settings.n_best} is above the beam, {settings.beam_size}: a search gives at most as many translations "
            "as its beam, also to --mbr; raise it (--beam), or draw them (--sampling)"
        )
    for name in ("temperature", "top_k", "top_p"):
        if getattr(settings, name) != DecodingConfig.model_fields[name].default:
            yield f"{name}: is of sampling, which is off; switch it on (--sampling), or leave it out"
