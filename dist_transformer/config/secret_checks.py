"""Checks for passwords, tokens and keys in a configuration, which is written into run folders, batch scripts and
MLflow. A job gets its secrets from the environment of the submitting shell, which Slurm keeps over requeues.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dist_transformer.config.credentials import holds_secret, is_secret
from dist_transformer.config.section import Section
from dist_transformer.config.yaml_positions import KeyPath, dotted

_CHECKED_APART = ("tracking", "uri")
"""Key with a check of its own, which also refuses a user without a password."""


def secret_problems(sections: Mapping[str, Section]) -> Iterator[tuple[KeyPath, str]]:
    """Yields a problem for each text that looks like a secret, by its content or by the name of its variable."""
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
    """Yields every text in a section, also in mappings and lists, with its key path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts((*path, key), part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _texts((*path, number), part)
