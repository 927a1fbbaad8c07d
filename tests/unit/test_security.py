"""No input of others is executed: where the program could, stands here and on the page SECURITY.md, and nowhere else."""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import without

from dist_transformer.errors import CheckpointError
from dist_transformer.interop.foreign_weights import read_tensors

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "dist_transformer"
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EXECUTING = {"eval", "exec", "compile", "__import__"}
UNSAFE = {
    "torch.load",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
    "runpy.run_path",
    "runpy.run_module",
    "pyfunc.load_model",
    "load_from_checkpoint",
    "dist.all_gather_object",
    "dist.broadcast_object_list",
}
UNSAFE_OPTIONS = {"shell", "allow_pickle", "trust_remote_code"}
ALLOWED = {
    ("interop/foreign_weights.py", "from pickle import UnpicklingError"),
    ("interop/foreign_weights.py", "torch.load(weights_only=True)"),
    ("distributed/group.py", "dist.all_gather_object"),
    ("distributed/group.py", "dist.broadcast_object_list"),
}
"""File of the package, and what it holds."""


def dotted(node: ast.expr) -> str:
    """The last two names of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value).rpartition('.')[2]}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe_in(source: str) -> Iterator[str]:
    """What of a module may execute its input."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLERS:
            yield f"from {node.module} import {', '.join(alias.name for alias in node.names)}"
        elif isinstance(node, ast.Call):
            name, options = dotted(node.func), {each.arg: each.value for each in node.keywords}
            if (
                name == "torch.load"
                and isinstance(safe := options.get("weights_only"), ast.Constant)
                and safe.value is True
            ):
                yield "torch.load(weights_only=True)"
            elif name in UNSAFE | EXECUTING:
                yield name
            for option in UNSAFE_OPTIONS & {*options}:
                if not (isinstance(value := options[option], ast.Constant) and value.value is False):
                    yield f"{option}="


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["import pickle"]),
        ("from cloudpickle import loads", ["from cloudpickle import loads"]),
        ("torch.load(p)", ["torch.load"]),
        ("torch.load(p, weights_only=False)", ["torch.load"]),
        ("torch.load(p, weights_only=w)", ["torch.load"]),
        ("eval(text)", ["eval"]),
        ("exec(text)", ["exec"]),
        ("yaml.load(text, Loader)", ["yaml.load"]),
        ("run('x', shell=True)", ["shell="]),
        ("run('x', shell=whatever)", ["shell="]),
        ("np.load(p, allow_pickle=True)", ["allow_pickle="]),
        ("import os.path; model.eval(); np.save(p, a, allow_pickle=False)", []),
    ],
)
def test_what_may_execute_its_input_is_noticed(source, found):
    assert [*unsafe_in(source)] == found


def test_the_package_executes_none_of_its_inputs_but_where_the_page_says_so():
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in PACKAGE.rglob("*.py")
        for what in unsafe_in(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED
    page = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    assert [file for file, _ in ALLOWED if f"`{file}`" not in page] == []


def test_shell_scripts_evaluate_the_setup_lines_alone():
    scripts = [*REPOSITORY.glob("slurm/*.sbatch"), *REPOSITORY.glob("launch/*.sh"), REPOSITORY / ".ci" / "run"]
    lines = {
        line.strip()
        for path in scripts
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\beval\b|\b(ba)?sh -c\b", line) and not line.lstrip().startswith("#")
    }
    assert lines <= {'eval "$setup"'}


class Executed:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_weights_of_others_execute_nothing(tmp_path, protocol):
    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"weight": Executed(tmp_path / "executed")}, protocol))
    with pytest.raises(CheckpointError):
        read_tensors(tmp_path / "weights.pt")
    assert not (tmp_path / "executed").exists()


STARTS_A_PROCESS = """
import subprocess, sys
from dist_transformer.cli import main
main.app = lambda: subprocess.run([sys.executable, "-m", "dist_transformer", "--help"], check=True)
main.main()
"""


def test_no_module_of_the_current_folder_is_imported(tmp_path):
    """As ranks and MLflow's pages are started."""
    (tmp_path / "typer.py").write_text("open('executed', 'w')", encoding="utf-8")
    command = [
        sys.executable,
        "-P",
        "-c",
        STARTS_A_PROCESS,
    ]  # -P: as by the installed command, and of this process alone
    done = subprocess.run(
        command, cwd=tmp_path, env=without(["PYTHONSAFEPATH"]), capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_every_dependency_of_the_hub_loads_data_sets_without_their_programs():
    """From its version 4 on `datasets` runs no program of a data set."""
    assert '"datasets>=4,' in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
