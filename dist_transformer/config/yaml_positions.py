"""Positions of the keys of a configuration: YAML files read into values with their file and line.

A value's path is a tuple of keys, ("optimizer", "learning_rate").
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dist_transformer.config.yaml12 import Loader
from dist_transformer.errors import ConfigError
from dist_transformer.files import MISPLACED, patiently

KeyPath = tuple[str | int, ...]
_TEXT = "tag:yaml.org,2002:str"


@dataclass
class Marked:
    """Plain values of a configuration and, for each key path, its position ("file:line")."""

    values: dict[str, Any]
    where: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Returns the position of the key, or of the nearest key above it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.where:
                return self.where[path[:length]]
        return "configuration"

    def place_of(self, problem: str) -> str:
        """Returns the position of the key that a problem begins with, or of the nearest key above it."""
        named = (path for path in self.where if problem.startswith((f"{dotted(path)}:", f"{dotted(path)}.")))
        return self.place(max(named, key=len, default=()))


def read_yaml(path: Path) -> Marked:
    """Reads the values of one YAML file with their lines.

    Raises:
        ConfigError: the file is missing, is not YAML, repeats a key, or is not a mapping.
        MachineError: its disk does not answer.
    """
    try:
        text = patiently(path, lambda: path.read_text(encoding="utf-8"), MISPLACED)
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file or folder; give the path of a YAML file"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder; give a YAML file: that of a run folder is its config.yaml"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read, expected UTF-8 text that is open to this user: {error}"]) from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Marked:
    """Parses the text of a YAML file, as `read_yaml`; `name` is the name of the file in messages."""
    try:
        loader = Loader(text)
        try:
            return _read(loader, name)
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{ord(text[error.position]):04X} is not allowed; remove it"
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = str(error.problem)
    except RecursionError:
        line, problem = 1, "it is nested too deeply, or a value contains itself"
    raise ConfigError([f"{name}:{line}: not valid YAML: {problem}"])


def _read(loader: Loader, name: str) -> Marked:
    node = loader.get_single_node()
    if node is None:
        return Marked({}, {(): f"{name}:1"})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([f"{name}:1: expected `key: value` lines, got {node.tag.rsplit(':', 1)[-1]}"])
    where: dict[KeyPath, str] = {}
    problems: list[str] = []
    _walk(loader, node, (), name, where, problems)
    if problems:
        raise ConfigError(problems)
    return Marked(loader.construct_document(node), where)


def _walk(
    loader: Loader, node: yaml.Node, path: KeyPath, name: str, where: dict[KeyPath, str], problems: list[str]
) -> None:
    where.setdefault(path, f"{name}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _walk(loader, child, (*path, index), name, where, problems)
    elif isinstance(node, yaml.MappingNode):
        for key_node, child in node.value:
            line = f"{name}:{key_node.start_mark.line + 1}"
            if key_node.tag != _TEXT:
                got = key_node.value if isinstance(key_node, yaml.ScalarNode) else key_node.id
                problems.append(f"{line}: expected a name before the colon, got {got}; if it is one, put it in quotes")
                continue
            key = (*path, str(loader.construct_object(key_node, deep=True)))
            if key in where:
                problems.append(f"{line}: {dotted(key)} is given twice, first at {where[key]}; keep one")
            where[key] = line
            _walk(loader, child, key, name, where, problems)


def merge(below: Marked, above: Marked) -> Marked:
    """Returns `below` overridden by `above`: mappings are merged, every other value is replaced."""
    return Marked(_merged(below.values, above.values), {**below.where, **above.where})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both_mappings = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_mappings else value
    return result


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
