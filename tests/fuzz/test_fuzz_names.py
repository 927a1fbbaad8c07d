"""Names of runs and folders with anything in them: taken or refused with a message; nothing is executed or made elsewhere."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from cluster_helpers import SBATCH, FakeSlurm, small_snapshot
from fake_slurm import job_line
from forked_command import bounded, must_end_in_a_message, run_command
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.run.folder import RunDir

pytestmark = pytest.mark.slow

SHELL = ["$(touch executed)", "`touch executed`", ";touch executed;", "|touch executed", "&touch executed&",
         "\ntouch executed\n", "'", '"', "'\"$(touch executed)\"'", "${IFS}", "*", "?", "~", "!", ">executed", "<", "#", "%",
         "%j", "%a", "\\"]  # fmt: skip
PATHS = [
    "..",
    ".",
    "/",
    "../",
    "../../outside",
    "/tmp/outside",
    "a/b",
    "a/../..",
    "-",
    "--",
    "-rf",
    "--help",
    "prepared",
    "mlflow.db",
]
ODD = [*SHELL, *PATHS, "", " ", "\0", "\r", "\t", "\v", "\x1b[31m", "\x85", "\u2028", "\u202e", "é", "e\u0301", "ß", "日本", "👾",
       "x" * 300, "a", "A", "0", "_", "run", "=", ",", "[", "{", "null", "5", "1e3", "\ud800"]  # fmt: skip
NAMES = st.lists(st.sampled_from(ODD) | st.text(max_size=3), min_size=1, max_size=3).map("".join)
SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a folder of runs, below a folder of its own; sbatch and squeue are at hand."""
    place = tmp_path_factory.mktemp("names") / "work"
    (place / "here").mkdir(parents=True)
    slurm = FakeSlurm(place.parent / "bin")
    slurm.folder.mkdir()
    slurm.program("sbatch", SBATCH)
    slurm.program("squeue", 'cat "$(dirname "$0")/jobs"')
    slurm.program("scancel", 'printf "%s\\0" "$@" > "$(dirname "$0")/cancelled"')
    slurm.set_jobs("")
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{slurm.folder}:{os.environ['PATH']}")
        patch.setattr("dist_transformer.cluster.submit.take_snapshot", small_snapshot)
        os.chdir(place / "here")
        yield place
        os.chdir(before)


def config_of(place: Path, name: str, root: str = "runs") -> Path:
    values = {"run": {"name": name, "root": root}, "data": {"train": {"demo": "train"}}, "model": {"preset": "tiny"},
              "tracking": {"enabled": False}, "tokenizer": {"vocabulary_size": 500}}  # fmt: skip
    file = place / "config.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=False), encoding="utf-8")
    return file


def made(place: Path) -> set[str]:
    """All that is below the folder of this test, but for the programs and what sbatch has recorded."""
    above = place.parent
    return {str(path.relative_to(above)) for path in above.rglob("*") if path.relative_to(above).parts[0] != "bin"}


def assert_submitted_as_it_is(place: Path, name: str, folder: Path) -> None:
    """The job has this name, and this run folder as its only argument."""
    call = FakeSlurm(place.parent / "bin").calls[-1]
    assert f"--job-name={name}" in call
    assert call[-2:] == [str(folder / "slurm/train.sbatch"), str(folder)]


@bounded(20)
@given(NAMES, st.booleans())
def test_a_run_of_any_name_is_submitted_in_its_folder_or_refused_and_nothing_made(place, name, is_override):
    for call in (place.parent / "bin").glob("call-*"):
        call.unlink()
    config, before = config_of(place, "run" if is_override else name), made(place)
    overrides = [f"run.name={name}"] if is_override else []
    for verb in (["submit"], ["config", "check"]):
        said = must_end_in_a_message(*verb, str(config), *overrides)
    added = made(place) - before
    inside = [path for path in added if path == "work/here/runs" or path.startswith("work/here/runs/")]
    assert sorted(inside) == sorted(added)
    assert not (place / "here/executed").exists()
    if added:
        (job,) = [path for path in (place / "here/runs").iterdir() if RunDir(path).job.is_file()]
        assert SAFE.fullmatch(job.name)
        assert_submitted_as_it_is(place, job.name, job)
        shutil.rmtree(place / "here/runs")
    elif not is_override:
        assert "run.name" in said or "File name too long" in said, (name, said)


@bounded(4)
@given(NAMES.filter(lambda name: not SAFE.fullmatch(name)))
def test_a_run_with_no_name_of_a_folder_is_not_trained(place, name):
    config, before = config_of(place, name), made(place)
    code, said = run_command("train", config)
    assert code == 2
    assert "run.name" in said or "config.yaml" in said
    assert made(place) == before


@bounded(8)
@given(NAMES.filter(lambda root: "\0" not in root and "\ud800" not in root))
def test_runs_in_a_folder_of_any_name_are_submitted_and_found_and_nothing_is_executed(place, odd):
    root = place / "here" / "roots" / odd.replace("/", "_").lstrip(".~")[:80]
    for call in (place.parent / "bin").glob("call-*"):
        call.unlink()
    code, said = run_command("submit", config_of(place, "a", str(root)))
    if code == 0:
        assert_submitted_as_it_is(place, "a", root / "a")
        comment = next(word for word in FakeSlurm(place.parent / "bin").calls[-1] if word.startswith("--comment="))
        running = job_line("4711", "RUNNING", comment=comment.removeprefix("--comment="))
        with mock.patch.dict(os.environ):
            FakeSlurm(place.parent / "bin").set_jobs(f"{running}\n")
            code, answer = run_command("status", "4711")
            assert code == 0, answer
            assert "4711" in answer
            FakeSlurm(place.parent / "bin").set_jobs("")
        stop = next(line for line in said.split("\n") if line.startswith("stop:")) if "\n" not in odd else None
        if stop is not None:
            assert shlex.split(stop, comments=True) == ["stop:", "dist-transformer", "stop", str(root / "a")]
    assert code in (0, 2), said
    assert "Traceback" not in said
    assert not [*place.parent.rglob("executed")]
