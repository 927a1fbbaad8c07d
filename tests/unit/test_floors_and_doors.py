"""The house: a module imports only from lower floors, and each third-party library has one door."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dist_transformer"
FLOORS = [
    {
        "errors",
        "run_dir",
        "json_records",
        "disk",
        "stop_request",
        "config",
        "share_folder",
        "stacks",
        "child_processes",
        "launching",
        "run_lock",
        "durations",
        "outputs",
    },
    {"cluster", "distributed", "planning"},
    {"model", "data", "tracking", "preflight", "rounds"},
    {"training", "decoding", "interop", "reporting"},
    {"cli", "__main__"},
]
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}
DOORS = {
    "deepspeed": {"training.engine"},
    "mlflow": {
        "tracking.mlflow_door",
        "tracking.mlflow_datasets",
        "tracking.mlflow_models",
        "tracking.pyfunc_folder",
    },
    "sqlalchemy": {"tracking.mlflow_door"},
    "sentencepiece": {"data.tokenizer", "data.sentencepiece_files"},
    "google": {"data.sentencepiece_files"},
    "datasets": {"data.sources"},
    "fsspec": {"data.addresses"},
    "aiohttp": {"data.addresses"},
    "tenacity": {"data.retries"},
    "matplotlib": {"data.report_pages", "reporting.figures", "reporting.attention", "reporting.fonts"},
    "psutil": {"training.memory", "training.system_metrics", "cli.first_rank"},
    "sacrebleu": {"decoding.score"},
    "sacremoses": {"decoding.score"},
    "comet": {"decoding.comet"},
    "ctranslate2": {"interop.ctranslate2_export"},
    "yaml": {"config.marks", "config.dialect"},
    "torch.distributed": {"distributed", "training.engine"},
    "subprocess": {
        "child_processes",
        "cluster.slurm",
        "cluster.snapshot",
        "launching",
        "cli.demo",
        "tracking.pyfunc_folder",
    },
}
WITHOUT_TORCH = {
    "errors",
    "run_dir",
    "disk",
    "stop_request",
    "config",
    "share_folder",
    "stacks",
    "child_processes",
    "launching",
    "run_lock",
    "durations",
    "outputs",
    "cluster",
    "planning",
    "tracking",
    "reporting",
}
HEAVY = {"torch", "deepspeed", "datasets", "mlflow", "transformers"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports anywhere; `from a import b` counts as a.b too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_lower_floors_or_its_own_part(path):
    own = part_of(name_of(path))
    for imported in imports_of(path):
        other = part_of(imported.removeprefix("dist_transformer."))
        if imported.startswith("dist_transformer.") and other != own and other in FLOOR_OF:
            # Within plain Python and within the command line there are no siblings to keep apart.
            is_one_floor = FLOOR_OF[own] == FLOOR_OF[other] in (0, len(FLOORS) - 1)
            assert FLOOR_OF[other] < FLOOR_OF[own] or is_one_floor, (
                f"{name_of(path)} imports {imported}: not a lower floor"
            )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_each_library_is_imported_through_its_door_only(path):
    for imported in imports_of(path):
        for library, doors in DOORS.items():
            if imported == library or imported.startswith(f"{library}."):
                assert name_of(path) in doors, f"{name_of(path)} imports {imported}: the door is {sorted(doors)}"


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(name_of(p)) in WITHOUT_TORCH], ids=name_of)
def test_plain_floors_do_not_import_torch_or_datasets(path):
    heavy = {imported for imported in imports_of(path) if imported.split(".")[0] in HEAVY - {"mlflow"}}
    assert not heavy, f"{name_of(path)} imports {heavy}"


def test_every_part_has_a_floor():
    assert {part_of(name_of(path)) for path in MODULES} - {"dist_transformer", "__init__"} == set(FLOOR_OF)


def test_no_folder_has_fewer_than_three_files_and_no_file_is_too_long():
    for folder in {path.parent for path in MODULES}:
        assert len(list(folder.glob("*.py"))) >= 3, f"{folder.name}: fewer than three files"
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > 330} == {}
