"""P3 on real ranks: a run that is stopped or killed, and started again, ends as the undisturbed one does."""

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from running import Command, kill_ranks, records, wait_for_start, wait_for_step
from safetensors.torch import load_file

from dist_transformer.data.manifest import Manifest, content_digest
from dist_transformer.data.recipe import FORMER_RULES

pytestmark = pytest.mark.slow

FAULTY = Path(__file__).with_name("faulty_train.py")
LONG = ("training.max_steps=24", "checkpoints.every_steps=4", "data.audit=true")


@pytest.fixture(scope="module")
def undisturbed(train_small: Callable[..., Path]) -> Path:
    """24 steps on two ranks in one go."""
    return train_small("undisturbed", *LONG, ranks=2)


def weights_of(run: Path) -> str:
    """A hash of the last checkpoint's weights and moments, whatever files they lie in."""
    newest = sorted((run / "checkpoints").glob("step_????????"))[-1]
    tensors = {k: v for file in newest.glob("state_*.safetensors") for k, v in load_file(file).items()}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def assert_same_run(run: Path, expected: Path) -> None:
    """Bit-identical: every step once, with the same batch, loss and norm; the same weights at the end."""
    keys = ("step", "loss", "nll", "gradient_norm", "learning_rate", "batch_digest", "total_target_tokens")
    assert [[r[k] for k in keys] for r in records(run)] == [[r[k] for k in keys] for r in records(expected)]
    assert [r["rows"] for r in records(run, "batch", "audit.jsonl")] == [
        r["rows"] for r in records(expected, "batch", "audit.jsonl")
    ]
    assert weights_of(run) == weights_of(expected)
    # Checkpoints of stops are no part of the average.
    model = "model/model.safetensors"
    assert (run / model).read_bytes() == (expected / model).read_bytes()


def test_six_steps_are_three_a_kill_and_three_and_stops_by_signals_save_and_exit_75(
    train_small, command: Command, undisturbed
):
    """Killed, stopped by SIGUSR1, stopped by SIGTERM, finished: each start waits for its signal after six steps."""
    run = command.folder / "runs" / "disturbed"
    for start, number in enumerate((signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM), 1):
        saved = max((int(path.name[5:]) for path in (run / "checkpoints").glob("step_????????")), default=3)
        process = command.start_program(
            FAULTY, "waits for a signal", "all", "small.yaml", "run.name=disturbed", *LONG, 2
        )
        wait_for_start(process, run, start)
        wait_for_step(run, saved + 2)
        if number == signal.SIGKILL:
            kill_ranks(process)
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=240)
        assert process.returncode == (1 if number == signal.SIGKILL else 75), out + err
        stopped_at = records(run)[-1]["step"]
        assert stopped_at < 24
        assert number == signal.SIGKILL or (run / f"checkpoints/step_{stopped_at:08d}/manifest.json").is_file()
        losses = [[r["loss"] for r in records(each)][:stopped_at] for each in (run, undisturbed)]
        assert losses[0] == losses[1], f"start {start}"
    train_small("disturbed", *LONG, ranks=2)
    assert_same_run(run, undisturbed)


def test_a_stop_file_stops_the_run_and_is_gone_at_the_next_start(train_small, command: Command):
    run = command.folder / "runs" / "stop-file"
    process = command.start_program(FAULTY, "waits for a signal", "all", "small.yaml", "run.name=stop-file", *LONG, 1)
    wait_for_step(run, 1)
    (run / "stop").touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, out + err
    train_small("stop-file", *LONG)
    assert [r["step"] for r in records(run)] == list(range(1, 25))


def test_a_resume_on_other_numbers_of_ranks_and_other_stages_trains_on_the_same_batches(train_small, undisturbed):
    for steps, ranks, stage in ((6, 1, 1), (12, 3, 2), (18, 2, 3), (24, 4, 0)):
        overrides = (*LONG, f"training.max_steps={steps}", f"training.zero_stage={stage}")
        run = train_small("elastic", *overrides, ranks=ranks)
    found, expected = records(run), records(undisturbed)
    assert [r["batch_digest"] for r in found] == [r["batch_digest"] for r in expected]
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], rel=1e-3)


def test_muon_resumes_as_adam_does(train_small):
    """Each rank holds a part of the momentum of matrices, which are updated whole."""
    muon = (*LONG, "optimizer.matrices=muon", "optimizer.learning_rate=0.005", "schedule.warmup_steps=4")
    expected = train_small("muon", *muon, ranks=2)
    for steps in (7, 24):
        run = train_small("muon-cut", *muon, f"training.max_steps={steps}", ranks=2)
    assert_same_run(run, expected)
    for steps, ranks, stage in ((8, 1, 1), (16, 3, 2), (24, 2, 0)):
        run = train_small(
            "muon-elastic", *muon, f"training.max_steps={steps}", f"training.zero_stage={stage}", ranks=ranks
        )
    found, losses = records(run), [r["loss"] for r in records(expected)]
    assert [r["batch_digest"] for r in found] == [r["batch_digest"] for r in records(expected)]
    assert [r["loss"] for r in found] == pytest.approx(losses, rel=1e-2)  # products in bf16
    assert losses[-1] < losses[0]


def test_a_log_interval_that_a_stop_cuts_in_two_reports_what_the_whole_one_does(train_small, undisturbed):
    intervals = (*LONG, "training.log_every_steps=8")
    whole = train_small("interval-whole", *intervals, ranks=2)
    cut = train_small("interval-cut", *intervals, "training.max_steps=8", ranks=2)
    cut = train_small("interval-cut", *intervals, ranks=2)
    assert [r["loss"] for r in records(cut)] == [r["loss"] for r in records(whole)]


def test_a_signal_to_every_process_leaves_the_loader_alive_until_the_run_is_saved(command: Command):
    """Slurm signals all processes of a job step, loader workers and their helpers included."""
    run = command.folder / "runs" / "all-signalled"
    overrides = ("data.loader_workers=1", "data.window_rows=8", "training.max_steps=100000")
    process = command.start("train", "small.yaml", "run.name=all-signalled", *overrides)
    wait_for_step(run, 20)
    os.killpg(process.pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, out + err
    assert "Traceback" not in err


def test_a_moved_folder_of_runs_goes_on_from_any_folder_without_its_text_by_the_prepared_corpus_in_it(
    command: Command, quick_client: Path, tmp_path: Path
):
    elsewhere = Command(tmp_path, quick_client)
    text, old, new = tmp_path / "text", tmp_path / "old", tmp_path / "new"
    text.mkdir()
    for file in command.folder.glob("*.[ed][ne]"):
        shutil.copy(file, text)
    command("train", "small.yaml", f"run.root={old}", f"data.root={text}", "training.max_steps=4")
    old.rename(new)
    shutil.rmtree(text)
    elsewhere("train", new / "small", "training.max_steps=6")
    assert [r["step"] for r in records(new / "small")] == [1, 2, 3, 4, 5, 6]
    elsewhere("average", new / "small", "--output", tmp_path / "model")
    command("report", new / "small")
    assert "is not there" not in (new / "small" / "report.html").read_text(encoding="utf-8")
    assert not old.exists()
    new.rename(tmp_path / "again")
    command("train", tmp_path / "again" / "small", "training.max_steps=7")
    (tmp_path / "again").rename(old)
    (tmp_path / "link").symlink_to(old)
    command("train", tmp_path / "link" / "small", "training.max_steps=8")
    (tmp_path / "link").unlink()
    command("train", old / "small", "training.max_steps=9")
    assert [r["step"] for r in records(old / "small")] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "old"]


def test_sets_that_are_added_and_removed_leave_a_run_its_prepared_corpus_and_what_was_not_held_out_is_named(
    command: Command, tmp_path
):
    """Also in a folder of runs that moved. A run without checkpoints gets a corpus of its own, or is refused."""
    root = tmp_path / "runs"
    for side in ("en", "de"):
        lines = (command.folder / f"train.{side}").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / f"seen.{side}").write_text("".join(lines[:9]), encoding="utf-8")
    seen = f"{{source: {tmp_path}/seen.en, target: {tmp_path}/seen.de}}"
    added = (
        "training.max_steps=6",
        f"data.more_validation={{seen: {seen}, same: {{source: valid.en, target: valid.de}}}}",
    )
    command("train", "small.yaml", f"run.root={root}", "training.max_steps=4")
    command("train", "small.yaml", f"run.root={root}", *added, "--ranks", 2)
    said = "data       data.more_validation.seen: not held out of the text"
    assert (root / "small" / "train.log").read_text(encoding="utf-8").count(said) == 1
    assert [r["step"] for r in records(root / "small")] == [1, 2, 3, 4, 5, 6]
    root.rename(tmp_path / "moved")
    run = tmp_path / "moved" / "small"
    command("train", run, "training.max_steps=7", f"data.test={seen}")
    assert f"data.test, {said[11:]}" in (run / "train.log").read_text(encoding="utf-8")
    command("train", "small.yaml", f"run.root={run.parent}", "training.max_steps=8")
    assert (run / "train.log").read_text(encoding="utf-8").count(": not held out") == 2
    [prepared] = (run.parent / "prepared").iterdir()
    command("train", "small.yaml", f"run.root={run.parent}", "run.name=new", *added)
    assert len([*prepared.parent.iterdir()]) == 2
    other = f"data.prepared={prepared}"
    assert "held_out.more_validation.seen" in command("train", "small.yaml", "run.name=third", other, *added, code=2)


def test_a_lowered_end_ends_the_run(train_small, command):
    train_small("lowered", "training.max_steps=6")
    assert [r["step"] for r in records(train_small("lowered", "training.max_steps=4"))] == [1, 2, 3, 4, 5, 6]
    end_by_epochs = ("training.max_steps=null", "training.max_epochs=1", "training.log_every_steps=5")
    before = (train_small("epochs", *end_by_epochs) / "metrics.jsonl").read_bytes()
    assert "training.max_epochs=1 ends the run" in (command.folder / "runs" / "epochs" / "train.log").read_text()
    assert (train_small("epochs", *end_by_epochs) / "metrics.jsonl").read_bytes() == before


def test_a_killed_rank_leaves_no_loader_process_behind(command: Command):
    run = command.folder / "runs" / "orphans"
    overrides = ("data.loader_workers=1", "data.window_rows=8", "training.max_steps=100000")
    process = command.start("train", "small.yaml", "run.name=orphans", *overrides)
    wait_for_step(run, 3)
    process.kill()
    process.communicate(timeout=240)  # returns when every process that holds its output has ended


def test_the_first_start_and_prepare_name_a_corpus_of_former_rules_and_its_run_resumes_without_it(
    command: Command, tmp_path: Path
):
    given = ("small.yaml", f"run.root={tmp_path}", f"data.prepared={tmp_path}/mine")
    rules = f"{tmp_path}/mine was prepared by the rules of format {FORMER_RULES} "
    assert "by the rules of" not in command("prepare", *given)
    made = Manifest.load(tmp_path / "mine")
    recipe = made.recipe | {"format": FORMER_RULES}
    digest = content_digest(recipe, made.tokenizer, made.splits, made.training)
    replace(made, recipe=recipe, digest=digest).save(tmp_path / "mine")
    assert rules in command("prepare", *given)
    command("train", *given, "training.max_steps=4", "--ranks", 2)
    shutil.rmtree(tmp_path / "mine")
    command("train", *given, "training.max_steps=5", "--ranks", 2)
    assert [r["step"] for r in records(tmp_path / "small")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "small" / "train.log").read_text(encoding="utf-8").count(rules) == 1
    assert Manifest.load(tmp_path / "mine").digest == made.digest
    command("train", *given, "training.max_steps=6")
