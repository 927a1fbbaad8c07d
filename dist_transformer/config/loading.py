"""Reading of a YAML file and overrides into a checked `Config`, with every problem reported at once.

    load_config(Path("configs/multi30k.yaml"), ["optimizer.learning_rate=3e-4", "data.root=/text"])

A file may contain `extends: other.yaml` (relative to itself): the other file is read first, and this one overrides it.
"""

import difflib
import os
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dist_transformer.config.checks import cross_problems, file_problems
from dist_transformer.config.credentials import holds_secret, shown_override, without_credentials
from dist_transformer.config.former_keys import take_former_keys
from dist_transformer.config.paths import is_address
from dist_transformer.config.schema import Config
from dist_transformer.config.yaml12 import WrittenFloat, WrittenInt, as_written, dump
from dist_transformer.config.yaml_positions import KeyPath, Marked, dotted, merge, parse_yaml, read_yaml
from dist_transformer.errors import ConfigError
from dist_transformer.plugins import problems_of, with_absolute_path


def load_config(path: Path, overrides: list[str] | None = None, *, check_files: bool = True) -> Config:
    """Reads and checks the configuration of a run. Raises ConfigError: with all problems, each with file, line, key,
    the expected and the given value.

    Args:
        path: a YAML file.
        overrides: `section.key=value` strings, the value read as YAML.
        check_files: also check that the text files that it names exist.
    """
    marked = read_extended(path)
    if isinstance(marked.values.get("nodes"), Mapping) and not marked.values.keys() & Config.model_fields.keys():
        place = marked.place(("nodes",))
        raise ConfigError(
            [f"{place}: nodes: of a pipeline; give the file to `pipeline run`, or to `submit --pipeline`"]
        )
    return config_of(with_overrides(marked, overrides or []), check_files=check_files)


def config_of(marked: Marked, *, check_files: bool = True) -> Config:
    """Checks values as `load_config` does, wherever they were read."""
    marked, problems = take_former_keys(marked)
    sections, invalid = _validate_sections(marked)
    problems += invalid
    problems += [f"{marked.place_of(problem)}: {problem}" for problem in cross_problems(sections)]
    if check_files:
        missing = [*file_problems(sections.get("data"), sections.get("tokenizer")), *problems_of(plugins_of(sections))]
        model, tracking = sections.get("model"), sections.get("tracking")
        if model and model.plugin and tracking and tracking.enabled and tracking.register_as:
            missing.append("tracking.register_as: MLflow serves our own network, not that of model.plugin; remove one")
        problems += [f"{marked.place_of(problem)}: {problem}" for problem in missing]
    if problems:
        raise ConfigError([without_credentials(problem) for problem in _with_known_once(problems)])
    return Config.model_validate(marked.values)


def _with_known_once(problems: Iterable[str]) -> Iterator[str]:
    """Leaves out the list of a section's known keys after the first of its unknown ones: files of other programs have many."""
    listed = set()
    for problem in problems:
        said, _, known = problem.partition("; known: ")
        yield said if known in listed else problem
        listed.add(known)


def to_yaml(config: Config) -> str:
    """Returns the resolved configuration as YAML that `load_config` reads back to an equal one."""
    return dump(config.model_dump(mode="json"))


def plugins_of(sections: Mapping[str, Any], above: str = "") -> dict[str, str | None]:
    """Returns the plug-ins of the sections, and of those within them, by their keys."""
    found: dict[str, str | None] = {}
    for name, section in sections.items():
        if isinstance(section, BaseModel):
            here, values = f"{above}{name}.", dict(section)
            found |= plugins_of(values, here) | ({f"{here}plugin": values["plugin"]} if "plugin" in values else {})
        elif isinstance(section, Mapping):
            found |= plugins_of(section, f"{above}{name}.")
    return found


def read_extended(path: Path, trail: tuple[Path, ...] = ()) -> Marked:
    """Reads a YAML file over those that it extends, unchecked. Raises ConfigError if it cannot be read."""
    real = Path(os.path.realpath(path))  # `resolve` raises on a loop of links
    if real in trail:
        raise ConfigError([f"{path}: `extends` leads back to itself: {' -> '.join(map(str, (*trail, path)))}"])
    marked = read_yaml(path)
    extended = marked.values.pop("extends", None)
    if extended is None:
        return marked
    if not isinstance(extended, str) or "\0" in extended:
        raise ConfigError(
            [f"{marked.place(('extends',))}: extends: expected the path of a YAML file, got {extended!r}"]
        )
    return merge(read_extended(path.parent / os.path.expanduser(extended), (*trail, real)), marked)


def with_overrides(marked: Marked, overrides: list[str]) -> Marked:
    """Returns values with `key.key=value` strings over them. Raises ConfigError if one has another form."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            problems.append(f"command line: {shown_override(override)!r}: expected section.key=value")
            continue
        marked = _with_value(marked, key, _value_of(text), f"command line: {shown_override(override)}")
    if problems:
        raise ConfigError(problems)
    return marked


def _with_value(marked: Marked, key: str, value: Any, place: str) -> Marked:
    path: KeyPath = tuple(key.split("."))
    for part in reversed(path):
        value = {part: value}
    new = {path[:n]: place for n in range(1, len(path)) if path[:n] not in marked.where}
    return merge(marked, Marked(value, {**new, path: place}))


def _value_of(text: str) -> Any:
    """Reads the value of an override as YAML; returns the text itself if it is no value (`a: b`, a lone quote)."""
    try:
        values = parse_yaml(f"value: {text}", "command line").values
    except ConfigError:
        return text
    return values["value"] if len(values) == 1 else text


def _validate_sections(marked: Marked) -> tuple[dict[str, Any], list[str]]:
    """Validates each section on its own, so that one bad section does not hide the problems of the others."""
    sections: dict[str, Any] = {}
    problems: list[str] = []
    for name, info in Config.model_fields.items():
        model = typing.cast(type[BaseModel], info.annotation)
        try:
            sections[name] = model.model_validate(marked.values.get(name, {}))
        except ValidationError as error:
            problems += [explain(marked, (name, *e["loc"]), e, model) for e in error.errors()]
    for name in (name for name in marked.values if name not in Config.model_fields):
        problems.append(f"{marked.place((name,))}: {name}: no such section{_likely(name, Config.model_fields)}")
    return sections, problems


def explain(marked: Marked, path: KeyPath, error: Mapping[str, Any], section: type[BaseModel]) -> str:
    """Returns our message for an error of pydantic, with the line of its key."""
    where = f"{marked.place(path)}: {dotted(path)}"
    if error["type"] == "extra_forbidden":
        key, known = str(path[-1]), _model_at(section, path[1:-1]).model_fields
        sections = (
            Config.model_fields if len(path) > 1 and path[0] in Config.model_fields else ()
        )  # of a pipeline: none
        return f"{where}: no such key{_likely(key, known, sections)}"
    if error["type"] == "missing":
        return f"{where}: is required but not given"
    return f"{where}: {value_problem(path, error)}"


def _likely(key: str, known: Collection[str], sections: Iterable[str] = Config.model_fields) -> str:
    """Returns the section that has an unknown key, or else a `suggestion` of the known ones."""
    elsewhere = [f"{name}.{key}" for name in sections if key in _model_at(Config, (name,)).model_fields]
    return f"; did you mean `{elsewhere[0]}`?" if elsewhere else suggestion(key, known)


def value_problem(path: KeyPath, error: Mapping[str, Any]) -> str:
    """Returns our message for an error of pydantic about the value of a key: the expected and the given value."""
    kind: str = error["type"]
    pattern = _PATTERNS.get(path[:2]) if kind == "string_pattern_mismatch" else None
    message = pattern or _EXPECTED.get(kind) or error["msg"][0].lower() + error["msg"][1:]
    if path[:2] in _NEVER_SHOWN or holds_secret(str(error["input"])):
        return message
    return f"{message}; got {_shown(error['input'])}{_remedy(kind, error['input'])}"


_EXPECTED = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "dict_type": "expected `key: value` lines below it",
    "model_type": "expected `key: value` lines below it",
    "tuple_type": "expected a list",
}
_PATTERNS: dict[KeyPath, str] = {
    ("slurm", "time_limit"): "expected a time as sbatch takes it: 30 (minutes), 1:00:00 or 2-00:00:00",
    ("tracking", "register_as"): "expected a name without / : '",
}
_PATHS = ("root", "prepared", "source_model", "target_model", "init_from")
"""Settings of any section that are a path of this machine; data.root may be an address."""
_NEVER_SHOWN = (("tracking", "uri"), *(("slurm", key) for key in ("environment", "setup", "sbatch", "srun")))


def _shown(value: Any) -> str:
    """Returns a value as it was written, with its type."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, int | float):
        return f"{as_written(value)} ({'int' if isinstance(value, int) else 'float'})"
    return f"{value!r} ({type(value).__name__})"


def _remedy(error_type: str, value: Any) -> str:
    if error_type == "string_type" and isinstance(value, bool):
        return "; put it in quotes"
    if error_type == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    wanted = {"int_type": WrittenInt, "float_type": WrittenInt | WrittenFloat, "bool_type": bool}.get(error_type)
    quoted = wanted is not None and isinstance(value, str) and isinstance(_value_of(value), wanted)
    return "; remove the quotes" if quoted else ""


def _model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """Returns the section at `path` below `model`; names and numbers in mappings and lists of sections lead nowhere."""
    for key in path:
        if (field := model.model_fields.get(str(key))) is not None:
            model = next(_sections_in(field.annotation), model)
    return model


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the sections that an annotation names, also in `| None`, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections_in(part)


def suggestion(word: str, known: Collection[str]) -> str:
    """Returns the known word nearest to another one, or all of them, as the end of a message."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"


def with_absolute_paths(config: Config, prepared: Path | None) -> Config:
    """Returns the configuration that is kept in the run folder, and that resumes the run from any working directory.

    `prepared`: the folder of the prepared corpus if it is known, so that the text itself is no longer needed.
    """
    absolute: Config = _with_absolute_paths(config)
    kept = {"root": config.data.root} if is_address(config.data.root) else {}
    found = {} if prepared is None else {"prepared": str(prepared.absolute())}
    return absolute.model_copy(update={"data": absolute.data.model_copy(update=kept | found)})


def _with_absolute_paths(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _with_absolute_paths(each) for name, each in value.items()}
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _with_absolute_paths(each, name) for name, each in value})
    if key == "plugin":
        return with_absolute_path(value)
    return str(Path(value).absolute()) if key in _PATHS and value is not None else value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Joins nested keys by dots: {"optimizer": {"beta1": 0.9}} becomes {"optimizer.beta1": 0.9}; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
