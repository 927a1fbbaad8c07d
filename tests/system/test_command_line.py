"""The command as a person meets it: quick, light, and clear about what it will do."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dist_transformer.config.loading import read_extended

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "datasets", "mlflow", "deepspeed", "numpy")
LIGHT = [
    ["--help"],
    ["train", "--help"],
    ["config", "check", "configs/demo.yaml"],
    ["config", "show", "configs/demo.yaml"],
    ["config", "schema"],
    ["submit", "--dry-run", "configs/demo.yaml"],
    ["pipeline", "--help"],
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_looking_imports_no_heavy_library(arguments, tmp_path):
    program = f"""
import sys
from dist_transformer.cli.main import app
try:
    app({[*arguments, f"run.root={tmp_path}"] if "demo.yaml" in arguments[-1] else arguments!r}, standalone_mode=False)
finally:
    loaded = sorted(set({HEAVY!r}) & set(sys.modules))
    print("LOADED", loaded, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stderr


def test_the_dry_run_prints_command_and_script_and_touches_nothing(tmp_path):
    arguments = [
        "submit",
        "--dry-run",
        "configs/demo.yaml",
        f"run.root={tmp_path}",
        "slurm.nodes=2",
        "slurm.sbatch.account=a b",
    ]
    out = subprocess.run(
        [sys.executable, "-m", "dist_transformer", *arguments],
        cwd=REPOSITORY, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "sbatch --parsable --requeue" in out
    assert "--nodes=2" in out
    assert "'--account=a b'" in out
    assert "#!/usr/bin/env bash" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_closed_streams_take_nothing_into_the_files_of_results(tmp_path):
    start = f"exec {sys.executable} -m dist_transformer"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for command, code in ((f"{start} status nosuch 2>&- >out.de", 2), (f"{start} config schema <&- >&- 2>&-", 0)):
        run = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, timeout=600, check=False)
        assert run.returncode == code
    assert (tmp_path / "out.de").read_bytes() == b""
    program = tmp_path / "child.py"  # of which the standard error is closed, and its child's with it
    program.write_text("""
import os
from dist_transformer.cli import main
main.run_as_command = lambda app: print(os.system("echo a >&2"))
main.main()
""")
    ended = ["bash", "-c", f"exec {sys.executable} {program} 2>&-"]
    told = subprocess.run(ended, env=environment, stdout=subprocess.PIPE, timeout=600, check=True, text=True).stdout
    assert told == "0\n"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_is_without_a_problem(command, path, tmp_path):
    said = read_extended(path).values
    for corpus in ("train", "validation", "test"):
        for side in ("source", "target"):
            if name := (said.get("data", {}).get(corpus) or {}).get(side):
                line = f"a sentence of the {side}\n".encode()
                (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    # A model to begin with is another run's: it is there after that run.
    first = (
        ["training.init_from=null", "tokenizer.source_model=null"] if "init_from" in said.get("training", {}) else []
    )
    assert "no problem found" in command("config", "check", path, f"data.root={tmp_path}", *first)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs" / "pipeline").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_pipeline_is_without_a_problem(command, path, tmp_path):
    for name in ("train", "validation", "test", "mono"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text(f"a sentence of {language}\n", encoding="utf-8")
    place = (path, f"data_root={tmp_path}", f"root={tmp_path}/root")
    nodes = yaml.safe_load((REPOSITORY / "configs" / "pipeline" / "student.yaml").read_text(encoding="utf-8"))["nodes"]
    shown = command("pipeline", "status", *place)
    assert {line.split()[1] for line in shown.splitlines()[2:]} == nodes.keys()
    assert shown.count("| to do ") == len(nodes)
    said = command("submit", "--dry-run", "--pipeline", *place)
    assert said.count("sbatch --parsable") == len(nodes)
    assert "--dependency=afterok:CORPUS" in said
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "slurm" / "clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_profile_can_be_submitted_with(command, path, tmp_path):
    out = command("submit", "--dry-run", REPOSITORY / "configs" / "demo.yaml", f"slurm.cluster={path.stem}",
                  f"run.root={tmp_path}", "slurm.gpus_per_node=1", "slurm.ranks_per_node=1", "slurm.nodes=1")  # fmt: skip
    assert "#!/usr/bin/env bash" in out


def test_the_schema_describes_every_setting(command):
    schema = json.loads(command("config", "schema"))
    settings = [
        (name, key, value) for name, section in schema["$defs"].items() for key, value in section["properties"].items()
    ]
    without = [f"{name}.{key}" for name, key, value in settings if "description" not in value]
    assert not without


def test_the_version_is_printed(command):
    import dist_transformer

    assert command("--version").strip() == dist_transformer.__version__
