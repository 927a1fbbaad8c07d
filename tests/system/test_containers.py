"""The images' recipes: linted, every file they copy is there, and the steps that both run install what they should."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONTAINERS = REPOSITORY / "containers"
DOCKERFILE = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
APPTAINER = (CONTAINERS / "dist-transformer.def").read_text(encoding="utf-8")
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(
    HADOLINT is None and "DIST_TRANSFORMER_REQUIRE_SERVICES" not in os.environ, reason="no hadolint here: make setup"
)
def test_hadolint_finds_nothing_in_the_dockerfile():
    assert HADOLINT, "no hadolint: it is in the dev extra"
    linted = subprocess.run(
        [HADOLINT, "--no-color", "--failure-threshold", "style", CONTAINERS / "Dockerfile"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert linted.returncode == 0, linted.stdout


def copied_by_docker() -> set[str]:
    return {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}


def copied_by_apptainer() -> dict[str, str]:
    section = re.search(r"^%files\n((?:    .+\n)+)", APPTAINER, re.MULTILINE)[1]
    return dict(line.split() for line in section.splitlines())


def test_both_images_copy_the_same_files_which_are_there_and_not_ignored():
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()
    assert copied_by_docker() == set(copied_by_apptainer())
    for name in copied_by_docker():
        assert (REPOSITORY / name).exists()
        assert f"!{name}" in ignored
    for name, inside in copied_by_apptainer().items():
        assert inside == f"/opt/dist-transformer/{name}"


def test_what_the_wheel_needs_is_copied():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        project["project"]["readme"],
        *project["project"]["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    assert needed <= copied_by_docker()


def test_both_images_begin_with_the_same_python_and_take_the_same_steps():
    base = re.search(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)[1]
    assert f"\nFrom: {base}\n" in APPTAINER
    steps = [
        re.findall(r"install\.sh (\w+)", text)
        for text in (DOCKERFILE.split("COPY containers/install.sh containers/")[1], APPTAINER.split("%post")[1])
    ]
    assert steps[0] == steps[1] == ["torch", "dependencies", "program"]
    assert re.findall(r"VARIANT=(\w+)$", APPTAINER.split("%arguments")[1].split("%files")[0], re.MULTILINE) == ["cuda"]
    assert "\nARG VARIANT=cuda\n" in DOCKERFILE


def test_the_docker_image_does_not_run_as_root():
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")


@pytest.fixture
def steps(tmp_path):
    """Runs a step of install.sh with a `python3` that records what pip is asked for, and what it reads, and without apt."""
    recorder = tmp_path / "bin" / "python3"
    recorder.parent.mkdir()
    recorder.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'
        f'printf "%s\\n" "$@" > {tmp_path}/asked\ncat > {tmp_path}/requirements.txt\n'
    )
    for name in ("apt-get", "rm"):
        (recorder.parent / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/changed\n')
        (recorder.parent / name).chmod(0o755)
    recorder.chmod(0o755)

    def run(*arguments):
        process = subprocess.run(
            [CONTAINERS / "install.sh", *arguments], env={"PATH": f"{recorder.parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        asked = tmp_path / "asked"
        return process, asked.read_text().split() if asked.exists() else []

    return run


@pytest.mark.parametrize(("variant", "from_pytorch"), [("cuda", False), ("cpu", True)])
def test_each_variant_installs_its_build_of_torch_at_the_known_version(steps, variant, from_pytorch, tmp_path):
    process, asked = steps("torch", variant)
    assert process.returncode == 0, process.stderr
    assert asked[:3] == ["-m", "pip", "install"]
    assert asked[-1] == "torch"
    assert asked[asked.index("--constraint") + 1] == "constraints.txt"
    assert ("https://download.pytorch.org/whl/cpu" in asked) == from_pytorch
    changed = tmp_path / "changed"
    assert ("gcc" in (changed.read_text() if changed.exists() else "")) != from_pytorch  # Triton's


def test_the_dependencies_are_those_of_the_project(steps, tmp_path):
    process, asked = steps("dependencies")
    assert process.returncode == 0, process.stderr
    assert "--constraint" in asked
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == project["dependencies"]


@pytest.mark.parametrize("arguments", [(), ("torch",), ("torch", "rocm"), ("all",)])
def test_a_step_or_variant_that_does_not_exist_is_refused(steps, arguments):
    process, asked = steps(*arguments)
    assert process.returncode == 2
    assert "expected" in process.stderr
    assert asked == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [("infiniband", 3, "--container-image=/images/dist-transformer.sqsh"), ("lab", 2, "/images/dist-transformer.sif")],
)
def test_the_container_keys_of_a_profile_are_valid_when_they_are_uncommented(command, tmp_path, name, keys, said):
    shipped = (REPOSITORY / "slurm" / "clusters" / f"{name}.yaml").read_text(encoding="utf-8")
    profile, uncommented = re.subn(r"^# (container_\w+:)", r"\1", shipped, flags=re.MULTILINE)
    assert uncommented == keys
    (tmp_path / "mine.yaml").write_text(profile, encoding="utf-8")
    script = command("submit", "--dry-run", REPOSITORY / "configs" / "demo.yaml", f"slurm.cluster={tmp_path}/mine.yaml",
                     f"run.root={tmp_path}", "slurm.gpus_per_node=1", "slurm.ranks_per_node=1", "slurm.nodes=1")  # fmt: skip
    assert said in script
