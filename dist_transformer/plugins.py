"""Plug-ins: code of the user's own for one setting, in a file or module outside of this package: docs/plugins.md.

A check reads the file and executes nothing; `load` executes it.
"""

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dist_transformer.errors import UserError
from dist_transformer.files import file_sha256

if TYPE_CHECKING:
    from torch import nn

    from dist_transformer.config.schema import ModelConfig

GROUP = "dist_transformer"
FORMS = "expected FILE.py:NAME, MODULE:NAME, or an entry point of the group dist_transformer"
T = TypeVar("T")


class BuildModel(Protocol):
    """`model.plugin`: builds a network, newly initialised from torch's random state, in fp32 and without buffers.

    Its `forward(source_BS, target_BT)` takes int64 ids with padding at the end, `target_BT` beginning with bos, and returns
    logits (B, T, target_vocabulary) of the token after each of `target_BT`. Every parameter takes part in each pass.
    """

    def __call__(
        self, config: "ModelConfig", source_vocabulary: int, target_vocabulary: int, pad_id: int
    ) -> "nn.Module": ...


KeepPair = Callable[[str, str], bool]
"""`data.filters.plugin`, of (source, target): True if the pair is kept; depends on nothing but the pair."""
ScoreTranslations = Callable[[Sequence[str], Sequence[str], Sequence[str]], float]
"""`validation.plugin`, of (hypotheses, references, sources): a score, higher being better; equal for equal text."""
ReadPairs = Callable[[], Iterable[tuple[str, str]]]
"""`data.train.plugin` and those of other corpora: yields (source, target), the same pairs in the same order each time. Each
process of `prepare` reads all of them and keeps its part."""


@dataclass(frozen=True)
class Plugin:
    """A plug-in that was found, and not executed. `module`: None if it is loaded from the file itself."""

    key: str
    file: Path
    name: str
    module: str | None

    @property
    def identity(self) -> str:
        """Name and content, which a resume must find unchanged, wherever the file lies."""
        return f"{self.name} of a file with SHA-256 {file_sha256(self.file)}"

    def load(self) -> Any:
        """Executes the file or module, once in a process, and returns the object of this name."""
        return call(self, partial(_loaded, self))


def find(key: str, given: str) -> Plugin:
    """Finds the plug-in that the setting `key` names. UserError: there is none, or its file does not define the name."""
    place, colon, name = given.rpartition(":")
    if not colon:
        entries = {each.name: each.value for each in entry_points(group=GROUP)}
        if given not in entries:
            there = ", ".join(sorted(entries)) or "none"
            raise UserError(f"{key}: no installed package has an entry point {given!r} (there: {there}); {FORMS}")
        place, _, name = entries[given].partition(":")
    is_file = place.endswith(".py")
    file = Path(place).expanduser().absolute() if is_file else _file_of_module(place)
    if file is None or not file.is_file():
        where = f"no such file: {file}" if is_file else f"no module {place!r} of Python source can be imported"
        raise UserError(f"{key}: {where}; {FORMS}")
    try:
        names = _defined_names(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}: {file}: is not Python: {error}; mend the file") from error
    if name not in names:
        raise UserError(f"{key}: {file} defines no {name!r}; it defines {', '.join(names) or 'nothing'}; {FORMS}")
    return Plugin(key, file, name, None if is_file else place)


def problems_of(given: dict[str, str | None]) -> Iterator[str]:
    """Yields a problem for each setting that names no plug-in; executes none."""
    for key, reference in given.items():
        try:
            if reference is not None:
                find(key, reference)
        except UserError as error:
            yield str(error)


def with_absolute_path(given: str | None) -> str | None:
    """Returns the reference of a plug-in that is found from any working directory."""
    place, colon, name = (given or "").rpartition(":")
    return f"{Path(place).expanduser().absolute()}:{name}" if colon and place.endswith(".py") else given


def call(plugin: Plugin, function: Callable[[], T]) -> T:
    """Returns the result of the user's code; UserError for any error in it."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise error_of(plugin, error) from error


def error_of(plugin: Plugin, error: BaseException) -> UserError:
    """Returns the message on an error that the user's code has raised, with its file and line."""
    frames = [(file, line) for file, line, *_ in traceback.extract_tb(error.__traceback__)]
    own = [line for file, line in frames if file == str(plugin.file)]
    line = getattr(error, "lineno", None) or (own[-1] if own else None)
    elsewhere = [each for each in frames if Path(__file__).parent not in Path(each[0]).parents]  # none: of its result
    where = f", line {line}" if line else ", {}, line {}".format(*elsewhere[-1]) if elsewhere else ""
    said = f"{plugin.name} of {plugin.file}{where}: {type(error).__name__}: {error}"
    return UserError(f"{plugin.key}: {said}; mend the plug-in")


def measure_of(plugin: Plugin) -> ScoreTranslations:
    """Executes the plug-in of a measure and returns it; its errors are UserErrors."""
    function: ScoreTranslations = plugin.load()
    return lambda *lists: call(plugin, lambda: float(function(*map(list, lists))))  # copies, which it may change


def _loaded(plugin: Plugin) -> Any:
    if plugin.module is not None:
        return getattr(importlib.import_module(plugin.module), plugin.name)
    name = f"dist_transformer_plugin_{file_sha256(plugin.file)[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, plugin.file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return getattr(sys.modules[name], plugin.name)


def _file_of_module(module: str) -> Path | None:
    """Finds the source of a module without importing its packages."""
    path, spec = None, None
    for end in range(1, module.count(".") + 2):
        spec = PathFinder.find_spec(".".join(module.split(".")[:end]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _defined_names(tree: ast.Module) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names
