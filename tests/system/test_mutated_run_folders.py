"""Whatever became of the files of a run folder, who looks at it gets an answer or one message, never a traceback."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from forked_command import run_command
from mlflow import MlflowClient
from mutated_runs import Mutation, copy_of, field_mutations, whole_file_mutations, write_run

from dist_transformer.cluster import requeue
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.errors import UserError
from dist_transformer.files import read_json, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.tracking.mlflow_client import RUN_UID_TAG

pytestmark = pytest.mark.slow
NOBODY = 65534
NUM_MUTATIONS = 30
SETTINGS = ["schedule.warmup_steps=1", "training.max_steps=9", "model.preset=tiny", "data.lanes=64",
            "tracking.enabled=false"]  # fmt: skip


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is asked, and nothing is tracked at an address of whoever runs this."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mutated")
    text = root / "a.yaml"
    write_text(text, "data: {train: {demo: train}, validation: {demo: validation}}\n")
    config = to_yaml(load_config(text, [*SETTINGS, f"run.root={root}/runs", "run.name=a"], check_files=False))
    write_run(RunDir(root / "runs" / "a"), config)
    return root / "runs" / "a"


def mutations(run: Path, num_fields: int, num: int) -> list[tuple[Path, Mutation]]:
    """Drawn evenly out of all: (file, relative to the run folder; mutation)."""
    draw = random.Random(17)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    found = [
        (file.relative_to(run), mutation)
        for file in files
        for mutation in (*whole_file_mutations(file), *field_mutations(file, draw, num_fields))
    ]
    return draw.sample(found, num)


def assert_answers(what: str, *arguments: object) -> None:
    code, text = run_command(*arguments)
    assert code in (0, 1, 2), f"{what}: {arguments}\n{text}"
    assert "Traceback" not in text, f"{what}: {arguments}\n{text}"


def looks(folder: Path) -> Iterator[tuple[object, ...]]:
    """The verbs that answer at once."""
    yield "status", folder
    yield "status", "--json", folder
    yield "status", "5", "--root", folder.parent
    yield "list", folder.parent
    yield "logs", folder
    yield "stacks", folder
    yield "stop", folder
    yield "cancel", folder
    yield "resume", folder
    yield "track", "end", folder, "--job", "5", "--attempt", "0", "--seconds", "1"


def pages(folder: Path, other: Path, out: Path) -> Iterator[tuple[object, ...]]:
    yield "report", folder, "--output", out
    yield "compare", folder, other, "--output", out
    yield "config", "show", folder / "config.yaml"
    yield "plan", folder
    yield "track", "sync", folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the mutated folder lies; never tracked, so that nobody waits for a store."""
    return tmp_path_factory.mktemp("place") / "runs" / "a"


def test_a_whole_folder_is_answered_without_a_problem(run: Path, place: Path) -> None:
    folder = copy_of(run, place)
    for arguments in (("status", folder), ("list", folder.parent), ("logs", folder)):
        assert run_command(*arguments)[0] == 0, arguments


def test_whoever_looks_at_a_mutated_folder_is_answered(run: Path, place: Path) -> None:
    for file, (name, mutate) in mutations(run, 3, NUM_MUTATIONS):
        folder = copy_of(run, place)
        mutate(folder / file)
        for arguments in looks(folder):
            assert_answers(f"{file}: {name}", *arguments)


def test_the_batch_script_is_answered_about_a_mutated_folder(run: Path, place: Path) -> None:
    asked = (
        lambda run_dir: requeue.begin(run_dir, "5", 1),
        lambda run_dir: requeue.end(run_dir, "5", 1, 1, "decide"),
        lambda run_dir: requeue.nodes_to_exclude(run_dir, "n1"),
    )
    for file, (_, mutate) in mutations(run, 3, NUM_MUTATIONS):
        folder = copy_of(run, place)
        mutate(folder / file)
        for ask in asked:
            with suppress(UserError, OSError):  # which the batch script prints, without a traceback
                ask(RunDir(folder))


def test_pages_plans_and_syncs_of_a_mutated_folder_end_in_order(run: Path, place: Path, tmp_path: Path) -> None:
    for file, (name, mutate) in mutations(run, 8, NUM_MUTATIONS // 2):  # each draws two pages
        folder = copy_of(run, place)
        mutate(folder / file)
        for arguments in pages(folder, run, tmp_path / "page.html"):
            assert_answers(f"{file}: {name}", *arguments)


@contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """Nobody may read it; root is somebody else meanwhile."""
    is_root, mode = os.geteuid() == 0, path.stat().st_mode
    path.chmod(0)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(mode)


def test_what_one_may_not_read_is_told_and_hides_nothing_else(run: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # not pytest's, into which root alone may look
        Path(name).chmod(0o755)
        other, folder = (copy_of(run, Path(name) / "runs" / each) for each in ("other", "a"))
        files = [path for path in folder.rglob("*") if path.is_file() or path.is_dir()]
        for path in [folder, *random.Random(17).sample(sorted(files), 10)]:
            with forbidden(path):
                code, text = run_command("list", folder.parent)
                assert code == 0, f"{path}\n{text}"
                assert "other" in text
                for arguments in looks(folder):
                    assert_answers(f"{path} is forbidden", *arguments)
        with forbidden(folder):
            assert "you may not look into this folder" in run_command("list", folder.parent)[1]
            assert run_command("status", folder)[0] == 2
        with forbidden(folder.parent):
            assert run_command("list", folder.parent)[0] == 2
        assert other.is_dir()


@pytest.mark.parametrize(
    "content", [b'{"run_id": "a1", "sta', b"[[1]]\n", b"\xff\xfe\x00\x01\n"], ids=["torn", "list", "bytes"]
)
def test_training_goes_on_over_damaged_records_and_tells_mlflow(
    train_small: Callable[..., Path], content: bytes
) -> None:
    """What only tells of a run keeps none from going on; what checkpoints hold is the truth."""
    arguments = ("damaged", "tracking.enabled=true")
    run_dir = RunDir(train_small(*arguments))
    before = read_json(run_dir.state)
    told = (run_dir.state, run_dir.metrics, run_dir.samples, run_dir.history, run_dir.tracking, run_dir.tracking_events)
    for path in (*told, run_dir.evaluation / "test.json", run_dir.owner):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    train_small(*arguments, f"training.max_steps={before['step'] + 1}")
    after = read_json(run_dir.state)
    assert (after["run_id"], after["state"], after["step"]) == (before["run_id"], "finished", before["step"] + 1)
    memory = read_json(run_dir.tracking)
    tracked = MlflowClient(tracking_uri=memory["uri"]).get_run(memory["run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags[RUN_UID_TAG] == before["run_id"]
