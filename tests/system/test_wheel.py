"""The wheel and the sdist: version, contents, size, and the command of the installed wheel in an empty folder."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from running import NOT_INHERITED, without

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
LARGEST = 2**20
TAG = "v7.8.9"


def run(*command: object, folder: Path, hidden: str = "PYTHONPATH") -> str:
    environment = without([hidden, "SETUPTOOLS_SCM_PRETEND_VERSION", *NOT_INHERITED])
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def git(folder: Path, *arguments: str) -> None:
    run("git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments, folder=folder)


def hatchling(folder: Path, *arguments: object) -> str:
    return run(sys.executable, "-m", "hatchling", *arguments, folder=folder, hidden="").strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone without tags of the files that are tracked here, as they are now."""
    folder = tmp_path_factory.mktemp("source") / "clone"
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT)
    for name in tracked.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All of it")
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a tagged commit, and the wheel that is built from it where there is no git."""
    tagged, unpacked = tmp_path_factory.mktemp("tagged") / "clone", tmp_path_factory.mktemp("unpacked")
    git(source, "clone", "--quiet", str(source), str(tagged))
    git(tagged, "tag", TAG)
    hatchling(tagged, "build", "--target", "sdist", "--directory", tagged / "dist")
    [sdist] = (tagged / "dist").iterdir()
    with tarfile.open(sdist) as file:
        file.extractall(unpacked, filter="data")
    [folder] = unpacked.iterdir()
    hatchling(folder, "build", "--target", "wheel", "--directory", unpacked / "dist")
    [wheel] = (unpacked / "dist").iterdir()
    return sdist, wheel


def test_the_version_is_that_of_the_tag_and_there_is_one_without_tags_and_without_git(
    source: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    sdist, wheel = built
    assert sdist.name == f"dist_transformer-{TAG[1:]}.tar.gz"
    assert wheel.name == f"dist_transformer-{TAG[1:]}-py3-none-any.whl"
    assert re.fullmatch(r"0\.1\.0\.dev1\+g[0-9a-f]+", hatchling(source, "version"))
    archive = tmp_path / "archive"
    shutil.copytree(source, archive, ignore=shutil.ignore_patterns(".git"))
    assert hatchling(archive, "version") == "0.1.0.dev0"


def test_the_wheel_is_small_and_has_the_package_and_nothing_else(source: Path, built: tuple[Path, Path]) -> None:
    _, wheel = built
    assert wheel.stat().st_size <= LARGEST
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    of_package = {name for name in names if not name.startswith(f"dist_transformer-{TAG[1:]}.dist-info/")}
    tracked = run("git", "ls-files", "-z", folder=source).split("\0")[:-1]
    expected = {name for name in tracked if name.startswith("dist_transformer/")}
    shared = {
        f"dist_transformer/share/{name}" for name in tracked if name.startswith(("configs/", "slurm/", "launch/"))
    }
    assert of_package == expected | shared | {"dist_transformer/_version.py"}
    assert {"dist_transformer/py.typed", "dist_transformer/share/configs/demo.yaml"} <= of_package


def test_the_sdist_has_what_a_build_needs_and_no_tests_or_results(built: tuple[Path, Path]) -> None:
    sdist, _ = built
    assert sdist.stat().st_size <= LARGEST
    with tarfile.open(sdist) as file:
        tops = {name.split("/")[1] for name in file.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "dist_transformer", "configs"} <= tops
    assert not tops & {"tests", "benchmarks", ".ci", ".venv"}


def test_the_installed_wheel_trains_and_translates_in_an_empty_folder(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The demo in short, in a new environment that borrows the dependencies of this one, but not this checkout."""
    _, wheel = built
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel,
        folder=tmp_path)  # fmt: skip
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty.mkdir()
    command = environment / "bin" / "dist-transformer"
    assert run(command, "--version", folder=empty).strip() == TAG[1:]
    configs = Path(run(python, "-m", "dist_transformer.package_data", "configs", folder=empty).strip())
    assert configs.is_relative_to(environment)
    settings = ["training.max_steps=4", "schedule.warmup_steps=2", "checkpoints.every_steps=2", "run.name=short"]
    settings += ["validation.translate=false", "tracking.enabled=false"]
    run(command, "train", configs / "demo.yaml", "--ranks", 2, *settings, folder=empty)
    (empty / "lines").write_text("Ten.\n\nThe book costs four euros.\n")
    run(command, "translate", "runs/short", "--input", "lines", "--output", "translated", folder=empty)
    assert len((empty / "translated").read_text().splitlines()) == 3
