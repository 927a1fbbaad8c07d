"""The decision after each attempt of a job."""

import json
from pathlib import Path

import pytest

from dist_transformer.cluster.restarts import decide, main, newest_checkpoint, run_folder
from dist_transformer.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.slurm.mkdir(parents=True)
    return run_dir


def _checkpoint(run_dir: RunDir, name: str) -> None:
    (run_dir.checkpoints / name).mkdir(parents=True)


@pytest.mark.parametrize("code", [0, 2])
def test_a_finished_run_and_a_user_error_are_never_requeued(run_dir: RunDir, code: int) -> None:
    assert not decide(run_dir, code, max_restarts=3).requeue
    assert not run_dir.restarts.exists()


@pytest.mark.parametrize("code", [75, 1, 70, 137])
def test_without_a_new_checkpoint_the_job_is_requeued_max_restarts_times(run_dir: RunDir, code: int) -> None:
    assert [decide(run_dir, code, max_restarts=3).requeue for _ in range(5)] == [True, True, True, False, False]


def test_a_new_checkpoint_begins_a_new_count(run_dir: RunDir) -> None:
    for step in range(1, 8):
        _checkpoint(run_dir, f"step_{step:08d}")
        assert decide(run_dir, 1, max_restarts=2).requeue
        assert decide(run_dir, 1, max_restarts=2).requeue
        assert not decide(run_dir, 1, max_restarts=2).requeue


def test_an_unfinished_checkpoint_is_no_progress(run_dir: RunDir) -> None:
    _checkpoint(run_dir, "step_00000010")
    assert decide(run_dir, 1, max_restarts=1).requeue
    _checkpoint(run_dir, "step_00000020.tmp")
    assert newest_checkpoint(run_dir) == "step_00000010"
    assert not decide(run_dir, 1, max_restarts=1).requeue


def test_the_newest_checkpoint_is_the_one_with_the_highest_step(run_dir: RunDir) -> None:
    for name in ("step_99999999", "step_100000000", "latest"):
        _checkpoint(run_dir, name)
    assert newest_checkpoint(run_dir) == "step_100000000"


def test_a_run_stopped_by_its_stop_file_stays_stopped(run_dir: RunDir) -> None:
    run_dir.stop_file.touch()
    decision = decide(run_dir, 75, max_restarts=3)
    assert not decision.requeue
    assert str(run_dir.stop_file) in decision.reason


def test_giving_up_names_the_checkpoint_from_which_nothing_went_on(run_dir: RunDir) -> None:
    _checkpoint(run_dir, "step_00000010")
    decide(run_dir, 1, max_restarts=1)
    assert decide(run_dir, 1, max_restarts=1).reason == "1 restarts without a new checkpoint after step_00000010"


def test_the_run_folder_is_found_from_a_configuration_with_overrides_or_is_given(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("run: {name: first}\ndata: {train: {source: not-there.en, target: not-there.de}}\n")
    assert run_folder([str(config), "run.name=second", "run.root=/else where"]).path == Path("/else where/second")
    assert run_folder([str(tmp_path)]).path == tmp_path


def test_the_batch_script_reads_the_folder_from_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"run": {"root": f"{tmp_path}/a b"}, "data": {"train": {"demo": "train"}}}))
    assert main(["folder", str(config), "run.name=c"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a b/c\n"
    assert (tmp_path / "a b" / "c" / "slurm").is_dir()


def test_the_batch_script_reads_the_decision_from_the_exit_code(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.config.write_text("data: {train: {demo: train}}\nslurm: {max_restarts_without_progress: 1}\n")
    assert main(["decide", str(run_dir.path), "1"]) == 0
    assert capsys.readouterr().out == "requeued: newest checkpoint None, restart 1 of 1 from there\n"
    assert main(["decide", str(run_dir.path), "1"]) == 1
    assert capsys.readouterr().out.startswith("not requeued: 1 restarts")


def test_before_there_is_a_configuration_the_default_limit_counts(run_dir: RunDir) -> None:
    assert [main(["decide", str(run_dir.path), "1"]) for _ in range(4)] == [0, 0, 0, 1]


def test_a_missing_configuration_is_a_user_error_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["folder", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


def test_wrong_arguments_say_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["folder"]) == 2
    assert "expected: folder CONFIG_OR_RUN_FOLDER" in capsys.readouterr().err
