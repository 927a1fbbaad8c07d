"""Reader and writer of the YAML of configurations: the plain types of YAML 1.2, which avoid the traps of YAML 1.1.

12:00:00, 2024-01-01, yes, no, 010 are text; 1e-9 and 100_000 are numbers; only true and false are true and false.
Tags of other types are refused.
"""

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_KINDS = {  # pattern, first characters
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9]\d*(_\d+)*|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", list("-+.0123456789")),
}
MOST_REPEATED = 10_000
"""Maximum number of values that the aliases of a file repeat: a few lines of nested aliases would repeat billions."""


class WrittenInt(int):
    """An integer that keeps its spelling, for a setting that expects text: `account: 1_000`."""

    text: str


class WrittenFloat(float):
    """A float that keeps its spelling: `revision: 12e5`."""

    text: str


def as_written(value: Any) -> Any:
    """Returns the text of a number of a YAML file; any other value unchanged."""
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else value


class Loader(yaml.SafeLoader):
    """Reads this dialect; executes nothing in a file, and limits the values that aliases repeat."""

    _num_repeated = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if alias is not None:
            self._num_repeated += _num_nodes(node)
            if self._num_repeated > MOST_REPEATED:
                problem = f"up to the alias *{alias.anchor} aliases repeat over {MOST_REPEATED:,} values; write fewer"
                raise yaml.composer.ComposerError(None, None, problem, alias.start_mark)
        return node


class Dumper(yaml.SafeDumper):
    """Quotes texts that `Loader`, or a reader of YAML 1.1, would not read as text."""


def dump(values: dict[str, Any]) -> str:
    """Returns plain values as YAML that reads back as equal ones."""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def load(content: str, are_texts: bool = False) -> Any:
    """Reads a file of another program. ValueError: it is no YAML.

    `are_texts`: every scalar is text, as in a vocabulary, whose pieces may be `null`, `~` and `1e5`.
    """
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader) if are_texts else Loader
    try:
        return loader(content).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _num_nodes(node: Any) -> int:
    if not isinstance(node, yaml.CollectionNode):
        return 1
    return 1 + sum(
        sum(map(_num_nodes, child)) if isinstance(child, tuple) else _num_nodes(child) for child in node.value
    )


def _read_number(loader: Loader, node: yaml.ScalarNode) -> int | float:
    text = str(loader.construct_scalar(node))
    try:
        number = WrittenInt(text, 0) if node.tag == f"{_TAG}int" else WrittenFloat(text)
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
    number.text = text
    return number


def _read_truth(loader: Loader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node))
    if text.lower() not in ("true", "false"):
        raise yaml.constructor.ConstructorError(None, None, f"expected true or false, got {text!r}", node.start_mark)
    return text.lower() == "true"


def _show_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these three rare line breaks; it escapes them only in double quotes.
    style = '"' if set(text) & set("\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", text, style)


Dumper.add_representer(str, _show_text)
Loader.yaml_implicit_resolvers = {}
Loader.yaml_constructors = {}
for _kind, (_pattern, _first) in _KINDS.items():
    for _user in (Loader, Dumper):
        _user.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), _first)
for _kind in ("null", "str", "seq", "map"):
    Loader.add_constructor(_TAG + _kind, yaml.SafeLoader.yaml_constructors[_TAG + _kind])
Loader.add_constructor(None, yaml.SafeLoader.yaml_constructors[None])
Loader.add_constructor(f"{_TAG}bool", _read_truth)
Loader.add_constructor(f"{_TAG}int", _read_number)
Loader.add_constructor(f"{_TAG}float", _read_number)
