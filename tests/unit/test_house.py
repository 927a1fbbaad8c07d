"""The house: a module imports only from its own folder or from one above it, without circles; one adapter a library."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dist_transformer"
ORDER = [
    *("errors", "format", "package_data", "files", "plugins"),
    *("config", "run", "processes", "distributed", "model", "data", "planning", "cluster", "preflight", "tracking"),
    *("interop", "decoding", "reporting", "training", "pipeline", "cli", "api", "__main__"),
]
"""Files and folders of the package from the lowest to the highest; docs/architecture.md says what each is for."""
WITHOUT_TORCH = {*ORDER[: ORDER.index("distributed")], "planning", "cluster", "tracking"}
HEAVY = {"torch", "deepspeed", "datasets", "transformers"}
ADAPTERS = {
    "deepspeed": {"training.engine.engine"},
    "mlflow": {
        "tracking.mlflow_client",
        "tracking.mlflow_models",
        "tracking.pyfunc_folder",
    },
    "sqlalchemy": {"tracking.mlflow_client"},
    "sentencepiece": {"data.tokenizer.tokenizer", "data.tokenizer.model_file"},
    "google": {"data.tokenizer.model_file", "tracking.mlflow_client"},
    "datasets": {"data.sources.corpus"},
    "fsspec": {"data.sources.remote"},
    "aiohttp": {"data.sources.remote"},
    "matplotlib": {"data.prepare.report", "reporting.figures"},
    "jinja2": {"reporting.html", "interop.model_card"},
    "psutil": {"training.memory", "training.metrics.system_metrics", "distributed.rank_zero"},
    "sacrebleu": {"decoding.metrics"},
    "sacremoses": {"decoding.metrics"},
    "fastchrf": {"decoding.translation_lines"},
    "ctranslate2": {"interop.ctranslate2_export"},
    "py3langid": {"data.languages"},
    "lingua": {"data.languages"},
    "yaml": {"config.yaml_positions", "config.yaml12"},
    "torch.distributed": {"distributed.group", "training.engine.engine"},
    "subprocess": {
        "processes.children",
        "processes.launching",
        "cluster.slurm",
        "cluster.batch_job",
        "run.snapshot",
        "cli.demo",
        "tracking.pyfunc_folder",
    },
}
LONGEST_FILE, MOST_FILES = 400, 32


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_version.py"}  # made by a build


def folder_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports anywhere but for types; `from a import b` counts as a.b too."""
    found, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    of_types = {id(node) for each in types for node in ast.walk(each)}
    for node in ast.walk(tree):
        if id(node) in of_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


IMPORTS = {name: imports_of(path) for name, path in PATHS.items()}
OURS = {
    name: {each.removeprefix("dist_transformer.") for each in found} & PATHS.keys() - {name}
    for name, found in IMPORTS.items()
}


def test_a_file_imports_from_its_own_folder_or_from_one_above_it():
    assert {folder_of(name) for name in PATHS} - {""} == set(ORDER)
    assert OURS[""] == {"api"}  # whose names the package has
    upward = [
        f"{name} imports {other}"
        for name, others in OURS.items()
        if name
        for other in others
        if ORDER.index(folder_of(other)) > ORDER.index(folder_of(name))
    ]
    assert upward == []


def test_there_is_no_circle():
    try:
        TopologicalSorter(OURS).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_only_the_command_line_and_its_python_form_import_slurms_folder():
    assert {folder_of(name) for name, others in OURS.items() if "cluster" in map(folder_of, others)} <= {
        "cluster",
        "cli",
        "api",
    }


def test_the_python_form_needs_no_command_line():
    assert {folder_of(name) for name, others in OURS.items() if "cli" in map(folder_of, others)} == {"cli", "__main__"}


def test_folders_without_torch_import_none():
    heavy = {name: {each for each in IMPORTS[name] if folder_of(each) in HEAVY} for name in PATHS}
    assert {name: each for name, each in heavy.items() if each and folder_of(name) in WITHOUT_TORCH} == {}


def test_each_library_is_imported_by_its_adapter_only():
    strangers = [
        f"{name} imports {each}: the adapter of {library} is {sorted(adapters)}"
        for name, found in IMPORTS.items()
        for each in found
        for library, adapters in ADAPTERS.items()
        if (each == library or each.startswith(f"{library}.")) and name not in adapters
    ]
    assert strangers == []


def test_folders_and_files_can_be_read_in_one_sitting():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in PATHS.items()}
    found = {name: length for name, length in lengths.items() if length > LONGEST_FILE}
    assert found == {}, f"expected at most {LONGEST_FILE} lines a file, found {found}: does one hold two ideas?"
    folders = {path.parent for path in PATHS.values()} - {PACKAGE}
    numbers = {each.name: len(list(each.glob("*.py"))) for each in folders}
    found = {name: number for name, number in numbers.items() if not 3 <= number <= MOST_FILES}
    assert found == {}, f"expected 3 to {MOST_FILES} files a folder, found {found}: does one belong elsewhere?"
