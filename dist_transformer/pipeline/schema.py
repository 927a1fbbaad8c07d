"""The file of a pipeline, and its nodes: each is a verb, and its keys are the options of that verb.

    root: runs/student
    nodes:
      teacher: {kind: train, config: teacher.yaml}
      forward: {kind: translate, model: {node: teacher}, input: train.en}

A file or a model is a path, or an output of another node: {node: NAME}, {node: NAME, output: NAME}.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, create_model

from dist_transformer.config.loading import explain, read_extended, with_overrides
from dist_transformer.config.section import Bool, Fraction, Int, Number, PositiveInt, Section, Str
from dist_transformer.config.yaml_positions import KeyPath, Marked, dotted
from dist_transformer.errors import ConfigError

NODE_NAME = re.compile(r"(?!(?:prepared|mlartifacts|lock)$)[A-Za-z0-9_][A-Za-z0-9_-]*")
"""Names of nodes, which are folders beside what all share; what is set aside has a dot in its name."""
HEADING = "the pipeline cannot run:"
CONFIGURED = ("prepare", "train")
RECORD, SETTINGS = "node.json", "settings.yaml"
"""Files in the folder of a node: the record of its newest start, and its configuration."""
PLACES = ("model", "run", "input", "source", "target", "reference", "scores", "ensemble", "shortlist")
"""Keys of nodes that are files or models."""
_TRAINED, _WRITTEN = ("train", "average"), ("translate", "filter")
READ: dict[str, tuple[str, ...]] = {
    **{"model": (*_TRAINED, "export"), "ensemble": _TRAINED, "run": ("train",), "scores": ("score",)},
    **dict.fromkeys(("input", "source", "target", "reference"), _WRITTEN),
    "shortlist": ("train", *_WRITTEN),
}
"""Kinds of the nodes that a key of a node may name."""


class PipelineKeys(Section):
    """Keys of the file. `set`: settings of every configuration in it, below those of its node; `data_root`: what relative
    paths of text and models start from."""

    root: Str
    data_root: Str | None = None
    set: dict[str, dict[str, Any]] = Field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = Field(min_length=1)


class NodeKeys(Section):
    """Keys of every node. `slurm`: settings of its job, over those in `set` of the file."""

    kind: Str
    slurm: dict[str, Any] = Field(default_factory=dict)


class Kind(NamedTuple):
    """A kind of node. `outputs`: what others may refer to, as paths in the node's folder, "" the main one; `made`: paths
    that are all there only once the verb has ended well."""

    keys: type[NodeKeys]
    outputs: dict[str, str]
    made: tuple[str, ...]


def _kind(outputs: dict[str, str], made: str, required: str = "", **optional: Any) -> Kind:
    fields: dict[str, Any] = dict.fromkeys(required.split(), (Str, ...))
    fields |= {key: each if isinstance(each, tuple) else (each | None, None) for key, each in optional.items()}
    return Kind(create_model("Keys", __base__=NodeKeys, **fields), outputs, tuple(made.split()))


_ENGINE, _ONE, _TEXTS = Literal["torch", "ctranslate2"], (PositiveInt, 1), (tuple[Str, ...], ())
_CONFIGURED: dict[str, Any] = {"config": Str, "set": (dict[str, dict[str, Any]], Field(default_factory=dict))}
_SEARCH: dict[str, Any] = {"engine": _ENGINE, "beam": PositiveInt, "length_penalty": Number}
_SAMPLING: dict[str, Any] = {"sampling": Bool, "temperature": Number, "top_k": Int, "top_p": Number, "seed": Int}
_LIMITS: dict[str, Any] = {"too_long": Literal["refuse", "split"], "max_source_tokens": Int, "max_tokens": Int}
KINDS = {
    "prepare": _kind({"": "corpus", "tokenizer": "corpus/tokenizer/source.model"}, "corpus/manifest.json",
                     **_CONFIGURED, processes=_ONE),
    "train": _kind({"": ".", "tokenizer": "model/source.model", "lexicon": "lexicon.npz"}, "model",
                   **_CONFIGURED, ranks=_ONE),
    "translate": _kind({"": "text"}, "text text.plan.json", "model input", ensemble=_TEXTS, **_SEARCH, **_SAMPLING,
                       **_LIMITS, ranks=_ONE),
    "score": _kind({"": "scores"}, "scores", "model source target", max_source_tokens=Int),
    "filter": _kind({"source": "source", "target": "target"}, "source target counts.json", "source target scores",
                    drop=(Fraction, 0.05)),
    "average": _kind({"": "model"}, "model", "run", last=PositiveInt, best=PositiveInt, ema=Bool),
    "export": _kind({"": "model"}, "model", "model",
                    to=(Literal["marian", "marian-npz", "ctranslate2", "argos"], "ctranslate2"),
                    quantization=Literal["int8", "int16", "float16", "bfloat16"], shortlist=_TEXTS),
    "evaluate": _kind({"": "scores.json"}, "scores.json", "model source reference", **_SEARCH, modified=_TEXTS),
}  # fmt: skip


class Node(NamedTuple):
    """A node: values of its keys, and the names of the nodes that it reads."""

    kind: str
    values: dict[str, Any]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Pipeline:
    """A checked file, in which outputs of nodes are absolute paths; `nodes` in an order in which they can run."""

    path: Path
    root: Path
    data_root: str | None
    marked: Marked
    nodes: dict[str, Node]

    def folder(self, name: str) -> Path:
        """The folder of a node; of `train` it is the run folder."""
        return self.root / name

    def is_made(self, place: str | Path) -> bool:
        """True if a path lies in the folder of a node, and so is made by it; others below `root` are the user's."""
        return os.path.relpath(place, self.root).partition(os.sep)[0] in self.nodes

    def located(self, place: str) -> Path:
        """The absolute path of a file or model."""
        return Path(self.data_root or ".").expanduser().absolute() / Path(place).expanduser()

    def section(self, *path: str) -> Marked:
        """The values at a path of the file, with their lines."""
        values: Any = self.marked.values
        for key in path:
            values = values.get(key, {})
        where = {at[len(path) :]: line for at, line in self.marked.where.items() if at[: len(path)] == path}
        return Marked(values, where)


def read_pipeline(path: Path, overrides: list[str] | None = None) -> Pipeline:
    """Reads a pipeline; configurations are read when needed. Raises ConfigError: all problems of the file, with lines."""
    marked = with_overrides(read_extended(path), overrides or [])
    file, problems = checked(marked, (), PipelineKeys, marked.values)
    given: dict[str, dict[str, Any]] = file.nodes if file else {}
    root = Path(file.root if file else "").expanduser().absolute()
    reads: dict[str, dict[str, None]] = {name: {} for name in given}

    def path_of(at: KeyPath, name: str, output: str | None) -> str:
        if output is None:  # a path that was typed, which starts here or there by its key
            starts = ("", (file and file.data_root) or "") if os.sep in name and at[2] in (*PLACES, "set") else ()
            places = [os.path.relpath(os.path.expanduser(os.path.join(start, name)), root) for start in starts]
            reads[str(at[1])] |= dict.fromkeys({each.partition(os.sep)[0] for each in places} & given.keys() - {at[1]})
            return name
        kind, where = KINDS.get(str(given.get(name, {}).get("kind"))), f"{marked.place(at)}: {dotted(at)}"
        if name not in given:
            close = [f"did you mean `{each}`?" for each in difflib.get_close_matches(name, given, n=1)]
            problems.append(f"{where}: no node {name!r}; {close[0] if close else 'known: ' + ', '.join(given)}")
        elif kind is not None and output not in kind.outputs:
            known = ", ".join(f"output: {each}" for each in kind.outputs if each)
            problems.append(f"{where}: {name} has no such output; expected {known or 'none'}")
        elif kind is not None and (of := given[name]["kind"]) not in (expected := READ.get(str(at[2]), (of,))):
            problems.append(f"{where}: {name} is a node of kind {of}; expected one of {', '.join(expected)}")
        elif kind is not None and of == "export" and (wrong := _unreadable(given[name], given[str(at[1])])):
            problems.append(f"{where}: {name} {wrong}")
        elif kind is not None:
            reads[str(at[1])][name] = None
            return str(root / name / kind.outputs[output])
        return name

    nodes, values = dict[str, Node](), dict[str, dict[str, Any]]()
    for name, keys in given.items():
        values[name] = {key: _with_paths(each, ("nodes", name, key), path_of) for key, each in keys.items()}
        kind = KINDS.get(str(keys.get("kind")))
        if kind is None or not NODE_NAME.fullmatch(name):
            expected = f"a kind of {', '.join(KINDS)}" if kind is None else "a name of letters, digits, '_' and '-'"
            problems.append(f"{marked.place(('nodes', name, 'kind'))}: nodes.{name}: expected {expected}")
            continue
        node, wrong = checked(marked, ("nodes", name), kind.keys, values[name])
        problems += wrong
        nodes[name] = Node(keys["kind"], dict(node or ()), tuple(reads[name]))
    try:
        order = [*TopologicalSorter(reads).static_order()]
    except CycleError as error:
        names = error.args[1]
        place = marked.place(("nodes", names[0]))
        problems.append(f"{place}: nodes read each other in a circle: {' <- '.join(names)}; remove a reference")
    if problems:
        raise ConfigError(problems, HEADING)
    marked = Marked({**marked.values, "nodes": values}, marked.where)
    return Pipeline(path, root, file.data_root, marked, {name: nodes[name] for name in order})


def _unreadable(export: Mapping[str, Any], reader: Mapping[str, Any]) -> str:
    """Returns why a node cannot read an exported model; "" if it can."""
    to = export.get("to", "ctranslate2")
    if to != "ctranslate2":
        return f"writes a model for another program (to: {to}), which no node can read; name the node that it exports"
    if reader.get("kind") not in ("translate", "evaluate"):
        return "writes a model that only translate and evaluate can read; name the node that it exports"
    if reader.get("engine") != "ctranslate2":
        return "writes a model for CTranslate2; set `engine: ctranslate2` here"
    return ""


def checked(marked: Marked, path: KeyPath, keys: type[Section], values: Any) -> tuple[Any, list[str]]:
    """Returns the values at a path as a section, and their problems; None if there are any."""
    try:
        return keys.model_validate(values), []
    except ValidationError as error:
        return None, [explain(marked, (*path, *e["loc"]), e, keys) for e in error.errors()]


def _with_paths(value: Any, at: KeyPath, path_of: Callable[[KeyPath, str, str | None], str]) -> Any:
    """Returns values of any depth with a path for each reference in them; other texts are given to `path_of` too."""
    if isinstance(value, Mapping):
        if {"node"} <= value.keys() <= {"node", "output"} and not isinstance(value["node"], Mapping):
            return path_of(at, str(value["node"]), str(value.get("output", "")))
        return {key: _with_paths(each, (*at, key), path_of) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_paths(each, (*at, n), path_of) for n, each in enumerate(value)]
    return path_of(at, value, None) if isinstance(value, str) else value
