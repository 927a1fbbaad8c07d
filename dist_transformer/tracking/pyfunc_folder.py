"""A model folder as a model that MLflow can load and serve by itself, with our code, settings and requirements.

MLmodel             signature (strings -> strings), settings of the search, loader
data/model/         the model folder, unchanged
code/               the part of this package that translates: it need not be installed where the model is served
requirements.txt    packages that translating imports, in the versions of this machine
input_example.json
"""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.models import ModelSignature
from mlflow.pyfunc import save_model
from mlflow.types import ColSpec, DataType, Schema

from dist_transformer.config.credentials import without_secrets
from dist_transformer.tracking.outbox import CannotBeSent

PACKAGE = Path(__file__).resolve().parents[1]
LOADER = f"{PACKAGE.name}.cli.served_model"
REQUIREMENTS = ("mlflow", "torch", "numpy", "sentencepiece", "safetensors", "pydantic", "pyyaml", "jinja2")
EXAMPLE = ["Good morning!"]
CHECK_SECONDS = 600
CHECK = """
import pathlib, sys
import mlflow.pyfunc
folder, example = pathlib.Path(sys.argv[1]), sys.argv[2]
answer = mlflow.pyfunc.load_model(str(folder)).predict([example])
import dist_transformer
code = pathlib.Path(dist_transformer.__file__)
if folder.resolve() not in code.resolve().parents:
    sys.exit(f"{code} was loaded in place of the code of the model")
if len(answer) != 1 or not isinstance(answer[0], str):
    sys.exit(f"expected one translation, got {answer!r}")
"""


@contextmanager
def pyfunc_folder(model: Path, settings: Mapping[str, Any], temporary: Path) -> Iterator[Path]:
    """Context with a folder in MLflow's format, made of a model folder and its settings of `decoding`.

    `temporary`: created for it, and removed at the end.
    """
    strings = Schema([ColSpec(DataType.string)])
    try:
        for module in modules_reached(LOADER):
            copied = temporary / "code" / module.relative_to(PACKAGE.parent)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(module, copied)
        folder = (temporary / "model").absolute()  # a process that works elsewhere reads it
        save_model(
            path=str(folder),
            loader_module=LOADER,
            data_path=str(model),
            code_paths=[str(temporary / "code" / PACKAGE.name)],
            signature=ModelSignature(strings, strings),
            input_example=EXAMPLE,
            pip_requirements=requirements(),
            model_config=dict(settings),
        )
        yield folder
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_translates(folder: Path) -> None:
    """Loads the result of `pyfunc_folder` and translates a sentence in a new process, as a server would.

    Raises CannotBeSent with that process' output: such a model must not be registered.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the GPU's memory may be full from training
    command = [sys.executable, "-c", CHECK, str(folder), *EXAMPLE]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotBeSent(f"the model did not translate a sentence within {CHECK_SECONDS} s") from None
    if done.returncode != 0:
        said = without_secrets((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
        raise CannotBeSent(f"the model cannot be loaded and is not registered: {said}")


def requirements() -> list[str]:
    """Packages that translating imports, as pip requirements; a local version label (2.8.0+cu128) is omitted."""
    return [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in REQUIREMENTS]


def modules_reached(module: str) -> set[Path]:
    """Files of this package that a module of it imports, at once or later, including itself and its packages."""
    reached: set[Path] = set()
    waiting = [module]
    while waiting:
        path = PACKAGE.parent.joinpath(*waiting.pop().split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_relative_to(PACKAGE) and file.is_file() and file not in reached:
            reached |= {file, *(parent / "__init__.py" for parent in file.parents if parent.is_relative_to(PACKAGE))}
            waiting += _imports_of(file)
    return reached


def _imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
