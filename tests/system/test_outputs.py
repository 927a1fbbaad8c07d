"""Nothing that a person has is removed or written over: every verb that writes is asked, for every kind of thing there."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_server import quick_command
from running import NOT_INHERITED, PROGRAM, Command, without

from dist_transformer import __version__
from dist_transformer.cli.main import Commands

pytestmark = pytest.mark.slow

READ = """
prepare run, train run, plan run, plan calibrate, simulate run, simulate calibrate, submit run,
preflight run_folder, status root, list root, logs root, stacks root, stop root, cancel root, resume root,
average run, extend-vocabulary model, extend-vocabulary pieces_file, export model, export shortlist, import source,
init source, init target, init validation, init test,
translate model, translate source, translate prefix, translate ensemble, score model, score source,
score target, score ensemble, evaluate run, evaluate source, evaluate references,
evaluate hypothesis, report root, compare root,
ui root, config check config, config show config, verify run, data inspect run, data audit run, data clean file,
track sync run, track model run, track model folder, track end run,
rerank n_best, rerank scores, pipeline run file, pipeline status file, pipeline report file, submit pipeline
"""
"""Paths that are only read, and roots under which runs are looked for."""
WRITTEN: dict[str, tuple[str, ...]] = {
    "average output": ("average", "runs/first", "--output", "PLACE"),
    "extend-vocabulary output": ("extend-vocabulary", "runs/first", "PLACE", "--pieces", "<bt>"),
    "export out": ("export", "runs/first", "PLACE", "--to", "marian"),
    "import out": ("import", "marian", "PLACE", "--from", "marian"),
    "init out": ("init", "train.en", "train.de", "--out", "PLACE"),
    "data clean out": ("data", "clean", "small.yaml", "PLACE"),
    "translate output": ("translate", "runs/first", "--input", "valid.en", "--output", "PLACE"),
    "evaluate output": ("evaluate", "runs/first", "--output", "PLACE"),
    "report output": ("report", "runs/first", "--output", "PLACE"),
    "compare output": ("compare", "runs/first", "runs/second", "--output", "PLACE"),
}
"""Paths that are written as one thing: the command, with PLACE for the path."""
ROOTS_PRIVILEGES = "-dac_override,-dac_read_search"
WITHOUT_PRIVILEGES = (
    ["setpriv", f"--bounding-set={ROOTS_PRIVILEGES}", f"--inh-caps={ROOTS_PRIVILEGES}"] if os.geteuid() == 0 else []
)
WRITTEN_INTO = {"preflight folder", "demo root", "demo-corpus folder"}
"""Folders in which some names are written; each has a test of its own."""


def paths_of(commands: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """ "verb parameter" for each path that a verb takes."""
    for name, command in commands.items():
        if hasattr(command, "commands"):
            yield from paths_of(command.commands, f"{prefix}{name} ")
            continue
        for parameter, kind in typing.get_type_hints(command.callback).items():
            kinds = {
                kind,
                *typing.get_args(kind),
                *(k for each in typing.get_args(kind) for k in typing.get_args(each)),
            }
            if Path in kinds:
                yield f"{prefix}{name} {parameter}"


def everything_in(folder: Path) -> dict[str, str]:
    """Every path below the folder, with what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else held
    return found


def refused(command: Command, *arguments: object, **environment: str) -> str:
    said = command(*arguments, code=2, text="A line .\n", **environment)
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def runs(train_small, command: Command) -> Path:
    """Two runs, and a Marian folder to import."""
    first = train_small("first", "checkpoints.average_last=1")
    shutil.copytree(first, first.with_name("second"))
    command("export", "runs/first", "marian", "--to", "marian")
    return first


def test_every_path_that_a_verb_takes_is_known_to_be_read_or_to_be_written_with_care():
    given = {*paths_of(Commands())}
    known = {*READ.replace("\n", " ").strip().split(", ")} | {*WRITTEN} | WRITTEN_INTO
    assert given == known, "say in READ, WRITTEN or WRITTEN_INTO what the verb does with each path"


@pytest.mark.parametrize("arguments", WRITTEN.values(), ids=[*WRITTEN])
def test_what_somebody_has_at_the_place_is_refused_and_stays(arguments, command: Command, runs: Path, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"label": "of another program"}')
    before = everything_in(tmp_path)
    for name in ("folder", "file", "link", "config"):
        place = tmp_path / name
        said = refused(command, *(place if argument == "PLACE" else argument for argument in arguments))
        assert f"{place}: is there already" in said
    left = {name: held for name, held in everything_in(tmp_path).items() if not name.endswith(".lock")}
    assert left == before


@pytest.mark.parametrize("arguments", WRITTEN.values(), ids=[*WRITTEN])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_computed(
    arguments, command: Command, runs: Path, tmp_path: Path
):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for place in (
        tmp_path / "file" / "new",
        tmp_path / ("n" * 300),
        tmp_path / "loop",
        tmp_path / "loop" / "new",
        "/proc/x",
    ):
        said = refused(command, *(place if argument == "PLACE" else argument for argument in arguments))
        assert f"{place}: cannot be written" in said


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/step_00000006", "checkpoints/new", "..", "slurm"])
def test_a_run_is_not_averaged_over_itself(place: str, command: Command, runs: Path):
    (runs / "slurm").mkdir(exist_ok=True)
    (runs / "slurm" / "job.json").write_text("{}")
    before = everything_in(runs.parent)
    said = refused(command, "average", "runs/first", "--output", runs / place)
    assert "is there already" in said or "lies among the checkpoints of a run" in said
    assert everything_in(runs.parent) == before


def test_the_model_of_another_run_is_not_replaced(command: Command, runs: Path, tmp_path: Path):
    before = everything_in(runs.parent)
    (tmp_path / "link").symlink_to(runs.with_name("second") / "model")
    for place in ("runs/second/model", tmp_path / "link"):
        said = refused(command, "average", "runs/first", "--output", place)
        assert f"{place}: is the model of another run; give a path outside {runs.with_name('second')}" in said
    assert everything_in(runs.parent) == before
    command("average", "runs/first", "--output", "runs/first/../first/model")


def test_a_model_folder_is_replaced_and_what_a_person_put_into_it_stays(command: Command, runs: Path, tmp_path: Path):
    output = tmp_path / "link"
    shutil.copytree(runs / "model", tmp_path / "model")
    output.symlink_to("model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"older")
    (tmp_path / "model" / "README.md").write_text("what it is")
    (tmp_path / "model" / "source.vocab").mkdir()
    command("average", "runs/first", "--output", output)
    assert output.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"link", "model"}
    assert (output / "model.safetensors").read_bytes() == (runs / "model" / "model.safetensors").read_bytes()
    assert (output / "README.md").read_text() == "what it is"
    assert (output / "source.vocab").is_dir()


def test_pages_replace_pages_and_go_to_devices_as_they_are(command: Command, runs: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    command("compare", "runs/first", "runs/second", "--output", page)
    command("report", "runs/first", "--output", page)
    assert "Compared" not in page.read_text(encoding="utf-8")
    for device in ("/dev/null", "/dev/stdout"):
        said = command("report", "runs/first", "--output", device)
        assert ("<!DOCTYPE html>" in said) == (device == "/dev/stdout")
    assert Path("/dev/null").is_char_device()
    assert Path("/dev/stdout").is_symlink()
    ours, theirs = os.pipe()
    os.close(ours)  # as `| head` that has ended
    program = [*PROGRAM, "report", "runs/first", "--output", "/dev/stdout"]
    ended = subprocess.run(program, cwd=command.folder, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (1, "")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)  # so that neither side waits for the other
    said = refused(command, "translate", "runs/first", "--input", "valid.en", "--output", tmp_path / "pipe")
    assert "is a device or a pipe" in said
    os.close(reader)


def test_the_embedded_corpus_is_written_beside_files_of_somebody_else_but_not_over_them(
    command: Command, tmp_path: Path
):
    (tmp_path / "train.en").write_text("my corpus\n")
    (tmp_path / "mine.en").write_text("my corpus\n")
    before = everything_in(tmp_path)
    assert f"{tmp_path}/train.en: is there already" in refused(command, "demo-corpus", tmp_path)
    assert everything_in(tmp_path) == before
    (tmp_path / "train.en").unlink()
    for _ in range(2):  # the same text once more changes nothing
        command("demo-corpus", tmp_path)
    assert (tmp_path / "mine.en").read_text() == "my corpus\n"
    assert len([*tmp_path.iterdir()]) == 7


def test_the_demo_makes_its_own_run_anew_and_no_other(command: Command, runs: Path, tmp_path: Path):
    (tmp_path / "demo-tour").mkdir()
    (tmp_path / "demo-tour" / "thesis.txt").write_text("years of work")
    before = everything_in(tmp_path)
    assert "demo-tour: is there already" in refused(command, "demo", "--root", tmp_path)
    assert everything_in(tmp_path) == before
    shutil.copytree(runs, tmp_path / "runs" / "demo-tour")
    assert "demo-tour: is there already" in refused(command, "demo", "--root", tmp_path / "runs")
    assert everything_in(tmp_path / "runs" / "demo-tour") == everything_in(runs)


def test_records_of_a_preflight_are_replaced_and_others_not(command: Command, tmp_path: Path):
    for name in ("rank_0.json", "report.json", "exclude"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text('{"mine": 1}')
        assert f"{folder / name}: is there already" in refused(command, "preflight", "--folder", folder)
        assert everything_in(folder) == {name: hashlib.sha256(b'{"mine": 1}').hexdigest()}


def test_a_corpus_is_not_prepared_into_a_folder_of_somebody_else(command: Command, tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years of work")
    before = everything_in(tmp_path)
    for verb in ("prepare", "train"):
        said = refused(command, verb, "small.yaml", "run.name=elsewhere", f"data.prepared={tmp_path}")
        assert f"{tmp_path}: is there already (a folder with work), expected a new path" in said
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("verb", [("train",), ("submit", "--dry-run")])
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "run.json", "slurm/train.sbatch"])
def test_a_run_is_not_written_into_a_folder_of_somebody_else(
    verb, name: str, command: Command, runs: Path, tmp_path: Path
):
    mine = tmp_path / "project" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("{}\n")
    before = everything_in(tmp_path / "project")
    settings = (
        f"run.root={tmp_path}",
        "run.name=project",
        f"data.prepared={next((runs.parent / 'prepared').iterdir())}",
    )
    said = refused(command, *verb, "small.yaml", *settings)
    assert f"project: holds {name}, but is no run folder" in said
    assert everything_in(tmp_path / "project") == before


def test_a_run_goes_into_a_folder_with_other_files_and_leaves_them(command: Command, runs: Path):
    folder = runs.with_name("beside")
    folder.mkdir()
    (folder / "small.yaml").write_text("mine")
    command("train", "small.yaml", "run.name=beside")
    assert (folder / "small.yaml").read_text() == "mine"
    (folder / "run.json").unlink()
    command("train", "small.yaml", "run.name=beside")


@pytest.fixture
def bound_by_permissions(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The command, for which a folder that is closed is closed, as root too."""
    folder = tmp_path_factory.mktemp("bound")
    with quick_command(folder, without(NOT_INHERITED), WITHOUT_PRIVILEGES):
        yield Command(command.folder, folder / "dist-transformer")


def test_folders_that_are_closed_are_told_before_anything_is_computed(
    bound_by_permissions: Command, runs: Path, tmp_path: Path
):
    run, closed = tmp_path / "run", tmp_path / "closed"
    shutil.copytree(runs, run)
    closed.mkdir()
    weights = run / "model" / "model.safetensors"
    weights.chmod(0o000)
    said = refused(bound_by_permissions, "evaluate", run)
    assert f"{weights}: Permission denied: expected a path that exists, is of the right kind and is open" in said
    weights.chmod(0o444)
    for folder in (*(path for path in run.rglob("*") if path.is_dir()), run, closed):
        folder.chmod(0o555)
    before = everything_in(tmp_path)
    said = refused(bound_by_permissions, "evaluate", run)
    assert f"{run}/evaluation: cannot be written" in said
    assert f"or keep no scores: evaluate {run}/model" in said
    assert "BLEU" not in said
    assert f"{run}/model: cannot be written" in refused(bound_by_permissions, "average", run)
    for ranks in (1, 2):
        said = refused(bound_by_permissions, "train", "small.yaml", f"run.root={closed}", "--ranks", ranks)
        assert f"{closed}/prepared" in said
        prepared = next((runs.parent / "prepared").iterdir())
        settings = (f"run.root={closed}", f"data.prepared={prepared}", "--ranks", ranks)
        assert f"{closed}/small: cannot be written" in refused(bound_by_permissions, "train", "small.yaml", *settings)
    relative = os.path.relpath(closed / "page.html", bound_by_permissions.folder)
    said = refused(bound_by_permissions, "report", runs, "--output", relative)
    assert f"{relative}: cannot be written" in said
    closed.chmod(0o000)
    assert f"{closed}" in refused(bound_by_permissions, "status", closed)
    closed.chmod(0o555)
    assert everything_in(tmp_path) == before
    for folder in (run, closed, *(path for path in run.rglob("*") if path.is_dir())):
        folder.chmod(0o755)


def test_a_final_model_that_has_no_place_is_told_at_the_start(command: Command, runs: Path):
    model = runs.with_name("taken") / "model"
    model.mkdir(parents=True)
    (model / "thesis.txt").write_text("years of work")
    said = refused(command, "train", "small.yaml", "run.name=taken")
    assert f"{model}: is there already" in said
    assert not (runs.with_name("taken") / "metrics.jsonl").exists()


def test_checkpoints_and_logs_that_are_closed_are_told_before_the_first_step(
    bound_by_permissions: Command, runs: Path, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(runs, run)
    before = everything_in(run / "checkpoints")
    for name in ("checkpoints", "train.log"):
        mode = (run / name).stat().st_mode
        (run / name).chmod(mode & 0o555)
        said = refused(bound_by_permissions, "train", run, "training.max_steps=9")
        assert f"{run / name}: cannot be written" in said
        (run / name).chmod(mode)
    assert everything_in(run / "checkpoints") == before


def test_in_a_folder_that_the_user_may_not_enter_a_command_runs(tmp_path: Path) -> None:
    """As by `sudo -u` from a home that is closed to others."""
    program = shlex.join([*WITHOUT_PRIVILEGES, sys.executable, "-P", "-m", "dist_transformer", "--version"])
    done = subprocess.run(
        ["sh", "-c", f"chmod 0 . && exec {program}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    tmp_path.chmod(0o700)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")
