"""What a check says about a plug-in, without executing it."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import ModelConfig
from dist_transformer.errors import UserError
from dist_transformer.model.plugin import PluginTransformer, build_plugin
from dist_transformer.plugins import find, measure_of, problems_of, with_absolute_path

CODE = "import os as system\nfrom json import dumps\nTABLE: dict = {}\nkeep = len\nclass Model: ...\ndef build(): ...\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE, encoding="utf-8")
    return path


def message_of(given: str) -> str:
    (problem,) = problems_of({"model.plugin": given, "data.filters.plugin": None})
    assert problem.startswith("model.plugin: ")
    return problem


@pytest.mark.parametrize("name", ["system", "dumps", "TABLE", "keep", "Model", "build"])
def test_every_way_to_define_a_name_is_found(file: Path, name: str):
    assert (found := find("model.plugin", f"{file}:{name}")).file == file
    assert found.load() is not None


def test_a_name_that_is_not_there_is_named_with_those_that_are(file: Path):
    assert "defines no 'built'; it defines system, dumps, TABLE, keep, Model, build" in message_of(f"{file}:built")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.py:build", "no such file: "),
        ("no.such.module:build", "no module 'no.such.module'"),
        ("math:sqrt", "no module 'math' of Python source"),
        ("build", "no installed package has an entry point 'build'"),
        ("", "entry point ''"),
        (":", "no module ''"),
        (".py:build", "no such file: "),
    ],
)
def test_a_plugin_that_is_not_there_is_one_message(given: str, message: str):
    assert message in message_of(given)
    assert "expected FILE.py:NAME, MODULE:NAME" in message_of(given)


@pytest.mark.parametrize("content", [b"def build(:\n", b"\xff\xfe", b"a\0b"])
def test_a_file_that_is_not_python_is_one_message(tmp_path: Path, content: bytes):
    (tmp_path / "odd.py").write_bytes(content)
    assert "is not Python" in message_of(f"{tmp_path / 'odd.py'}:build")


def test_a_module_and_an_entry_point_are_found_without_importing_their_packages(tmp_path, monkeypatch):
    package = tmp_path / "ours_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (package / "models.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = find("model.plugin", "ours_for_test.models:build")
    assert (found.file, found.module) == (package / "models.py", "ours_for_test.models")
    entry = metadata.EntryPoint("mine", "ours_for_test.models:build", "dist_transformer")
    monkeypatch.setattr("dist_transformer.plugins.entry_points", lambda group: metadata.EntryPoints([entry]))
    assert find("model.plugin", "mine") == found
    with pytest.raises(UserError, match="RuntimeError: imported"):
        found.load()


def test_the_identity_is_of_the_content_and_not_of_the_place(file: Path, tmp_path: Path):
    other = tmp_path / "other.py"
    other.write_text(CODE, encoding="utf-8")
    identity = find("model.plugin", f"{file}:build").identity
    assert find("model.plugin", f"{other}:build").identity == identity
    other.write_text(CODE + "\n", encoding="utf-8")
    assert find("model.plugin", f"{other}:build").identity != identity


def test_only_files_get_an_absolute_path(monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_path("a/b.py:build") == f"{tmp_path}/a/b.py:build"
    assert [with_absolute_path(given) for given in ("a.b:build", "mine", None)] == ["a.b:build", "mine", None]


def test_config_check_neither_executes_a_plugin_nor_imports_torch(tmp_path: Path):
    (tmp_path / "mine.py").write_text("raise SystemExit('executed')\ndef build(): ...\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model: {plugin: 'mine.py:build'}\ndata: {train: {demo: train}, filters: {plugin: 'mine.py:build'}}\n", "utf-8"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom dist_transformer.config.loading import load_config\n"
        "load_config(Path('run.yaml'))\nassert 'torch' not in sys.modules\nprint('checked')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("checked\n", "")


@pytest.mark.parametrize(
    "override", ["training.activation_checkpointing=true", "training.init_from=elsewhere", "data.max_tokens=auto"]
)
def test_settings_of_our_own_network_are_refused_beside_a_plugin(tmp_path: Path, file: Path, override: str):
    from config_problems import one_problem_of

    (tmp_path / "run.yaml").write_text("data: {train: {demo: train}}\n", encoding="utf-8")
    assert "is for our own network" in one_problem_of(tmp_path / "run.yaml", f"model.plugin={file}:build", override)


def test_a_model_that_mlflow_cannot_serve_is_not_to_be_registered_and_a_run_folder_that_says_so_is_read(tmp_path, file):
    from config_problems import one_problem_of

    (tmp_path / "run.yaml").write_text("data: {train: {demo: train}}\n", encoding="utf-8")
    given = (f"model.plugin={file}:build", "tracking.register_as=mine")
    assert "tracking.register_as: MLflow serves" in one_problem_of(tmp_path / "run.yaml", *given)
    assert load_config(tmp_path / "run.yaml", [*given], check_files=False).tracking.register_as == "mine"
    assert not load_config(tmp_path / "run.yaml", [*given, "tracking.enabled=false"]).tracking.enabled


@pytest.mark.parametrize("code", ["None", "lambda: 3"])
def test_an_error_of_the_program_about_what_the_code_returned_names_no_line_of_the_program(tmp_path: Path, code: str):
    (tmp_path / "odd.py").write_text(f"def score(*_):\n    return {code}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"score of [^,]*/odd.py: TypeError: float") as caught:
        measure_of(find("validation.plugin", f"{tmp_path}/odd.py:score"))([], [], [])
    assert "plugins.py" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Connection closed by peer [127.0.0.1]:1234"),
        MemoryError(),
    ],
)
def test_errors_of_memory_a_device_and_other_ranks_are_none_of_the_network(file: Path, error: Exception):
    class Network(torch.nn.Module):
        def forward(self, *_: torch.Tensor) -> torch.Tensor:
            raise error

    model = PluginTransformer(find("model.plugin", f"{file}:build"), Network(), 5, 0)
    with pytest.raises(type(error)) as caught:
        model(torch.ones(1, 2), torch.ones(1, 2))
    assert caught.value is error


@pytest.mark.parametrize("value", ["torch.tensor(1.0)", "torch.ones(3, dtype=torch.complex64)"])
def test_parameters_that_cannot_be_trained_or_kept_are_named(tmp_path: Path, value: str):
    code = f"module = torch.nn.Linear(3, 3)\nmodule.odd = torch.nn.Parameter({value}, requires_grad=False)\n"
    (tmp_path / "odd.py").write_text(f"import torch\n{code}build = lambda *_: module\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"odd.py returned odd, expected parameters of real numbers, with a dimension"):
        build_plugin(find("model.plugin", f"{tmp_path}/odd.py:build"), ModelConfig(), 3, 3, 0)


def test_a_table_of_whole_numbers_stays_as_it_is(tmp_path: Path):
    code = "module = torch.nn.Linear(3, 3)\nmodule.table = torch.nn.Parameter(torch.arange(3), requires_grad=False)\n"
    (tmp_path / "odd.py").write_text(f"import torch\n{code}build = lambda *_: module\n", encoding="utf-8")
    network = build_plugin(find("model.plugin", f"{tmp_path}/odd.py:build"), ModelConfig(), 3, 3, 0)
    assert torch.equal(dict(network.named_parameters())["network.table"], torch.arange(3))


@pytest.mark.parametrize("dtype", ["half", "double"])
def test_parameters_in_another_precision_are_those_of_fp32(tmp_path: Path, dtype: str):
    (tmp_path / "odd.py").write_text(f"import torch\nbuild = lambda *_: torch.nn.Linear(3, 3).{dtype}()\n", "utf-8")
    network = build_plugin(find("model.plugin", f"{tmp_path}/odd.py:build"), ModelConfig(), 3, 3, 0)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


def test_a_network_that_writes_into_its_ids_changes_none_of_a_batch(file: Path):
    class Network(torch.nn.Module):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*target.zero_().shape, 5) + source.zero_().sum()

    model, ids = (
        PluginTransformer(find("model.plugin", f"{file}:build"), Network(), 5, 0).eval(),
        torch.ones(1, 2).long(),
    )
    model(ids, ids)
    assert torch.equal(ids, torch.ones(1, 2))
