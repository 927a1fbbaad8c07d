"""Passwords, tokens and keys in a configuration. What it says is written into run folders, batch scripts and MLflow; a
job gets its secrets by the environment of the shell that submits it, which Slurm keeps for it over requeues.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dist_transformer.config.credentials import holds_secret, is_secret
from dist_transformer.config.section import Section
from dist_transformer.config.yaml_positions import KeyPath, dotted

_CHECKED_APART = ("tracking", "uri")
"""Takes no user either."""


def secret_problems(sections: Mapping[str, Section]) -> Iterator[tuple[KeyPath, str]]:
    """Texts of these sections that look like secrets, by the names of variables and by what they hold."""
    for name, section in sections.items():
        for path, text in _texts((name,), section.model_dump()):
            is_named = path[:2] == ("slurm", "environment") and is_secret(str(path[-1]), text)
            if is_named or (path != _CHECKED_APART and holds_secret(text)):
                yield path, f"{dotted(path)}: {_REMEDY_OF_A_JOB if name == 'slurm' else _REMEDY}"


_REMEDY_OF_A_JOB = (
    "looks like a secret, and would be written into the run folder; remove it here and `export` it in the shell that calls "
    "train or submit: the job inherits it, also when it is requeued"
)
_REMEDY = (
    "holds a password or token, and would be written into the run folder; give it to the filesystem by its own files or "
    "variables (~/.aws/credentials, HF_TOKEN, FSSPEC_<PROTOCOL>_<OPTION>) and remove it here"
)


def _texts(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Every text in a section, also in mappings and lists, and where it stands."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts((*path, key), part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _texts((*path, number), part)
