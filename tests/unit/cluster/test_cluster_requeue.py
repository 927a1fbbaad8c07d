"""The decision after each attempt of a job."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.cluster.requeue import decide, main, run_folder
from dist_transformer.files import read_json, write_json
from dist_transformer.run.attempts import attempts, newest_checkpoint
from dist_transformer.run.folder import RunDir


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
    assert main(["begin", "12", "0", str(config), "run.name=c"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a b/c\n"
    assert (tmp_path / "a b" / "c" / "slurm").is_dir()


def test_the_batch_script_reads_the_decision_from_the_exit_code(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.config.write_text("data: {train: {demo: train}}\nslurm: {max_restarts_without_progress: 1}\n")
    assert main(["end", str(run_dir.path), "12", "0", "1", "decide"]) == 0
    assert capsys.readouterr().out == "requeued: begins again, as there is no checkpoint yet\n"
    assert main(["end", str(run_dir.path), "12", "1", "1", "decide"]) == 3
    assert capsys.readouterr().out.startswith("not requeued: 1 restarts")


def test_before_there_is_a_configuration_the_default_limit_counts(run_dir: RunDir) -> None:
    assert [main(["end", str(run_dir.path), "12", "0", "1", "decide"]) for _ in range(4)] == [0, 0, 0, 3]


def test_each_attempt_leaves_a_record_of_its_beginning_and_its_end(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    main(["begin", "12_3", "0", str(run_dir.path)])
    main(["end", str(run_dir.path), "12_3", "0", "75", "decide"])
    with run_dir.attempts.open("a") as file:
        file.write('{"event": "ended", "torn')
    kept = [{key: r[key] for key in r if key not in ("time", "newest", "reason")} for r in attempts(run_dir)]
    assert kept == [
        {"event": "began", "job": "12_3", "attempt": 0, "nodes": "n[1-2]", "ranks": 4},
        {"event": "ended", "job": "12_3", "attempt": 0, "exit_code": 75, "how": "decide", "requeued": True},
    ]


def test_a_reason_with_an_odd_line_separator_is_still_one_record(run_dir: RunDir) -> None:
    record = '{"event": "ended", "time": 1.0, "job": "7", "reason": "one\u2028two\x85three"}'
    run_dir.attempts.write_text(f"{record}\n", encoding="utf-8")
    assert [record.get("reason") for record in attempts(run_dir)] == ["one\u2028two\x85three"]


@pytest.mark.parametrize("code", [1, 75, 143])
def test_what_a_person_or_slurm_has_ended_is_not_requeued(run_dir: RunDir, code: int) -> None:
    assert main(["end", str(run_dir.path), "12", "0", str(code), "ended"]) == 3
    assert not run_dir.restarts.exists()


def test_attempts_that_end_without_a_word_are_given_up_in_the_end_unless_there_is_progress(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.config.write_text("data: {train: {demo: train}}\nslurm: {max_restarts_without_progress: 2}\n")
    codes = [main(["begin", "12", str(attempt), str(run_dir.path)]) for attempt in range(10)]
    assert codes == [0] * 9 + [1]
    assert "9 attempts of job 12 began after checkpoint None and made no other; given up" in capsys.readouterr().err
    _checkpoint(run_dir, "step_00000010")
    assert main(["begin", "12", "10", str(run_dir.path)]) == 0
    assert main(["begin", "13", "0", str(run_dir.path)]) == 0


def _excluded(run_dir: RunDir) -> list[str]:
    return list(read_json(run_dir.excluded)) if run_dir.excluded.exists() else []


@pytest.mark.parametrize(("spare", "allowed"), [(0, 0), (1, 1), (2, 2), (9, 4)])
def test_no_node_is_excluded_that_the_partition_cannot_spare(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, spare: int, allowed: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "40")
    write_json(run_dir.preflight / "12-0" / "report.json", {"exclude": [f"n{n}" for n in range(6)], "outliers": []})
    main(["exclude", str(run_dir.path), str(run_dir.preflight / "12-0"), str(spare)])
    assert len(_excluded(run_dir)) == allowed


@pytest.mark.parametrize(("num_nodes", "allowed"), [(2, 1), (9, 1), (20, 2), (128, 12)])
def test_a_preflight_excludes_a_tenth_of_the_nodes_at_most_over_all_attempts(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, num_nodes: int, allowed: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(num_nodes))
    for attempt in range(3):
        folder = run_dir.preflight / f"12-{attempt}"
        bad = [f"n{number}" for number in range(attempt * 6, attempt * 6 + 6)]
        write_json(folder / "report.json", {"exclude": bad, "outliers": []})
        main(["exclude", str(run_dir.path), str(folder), "100"])
    assert len(_excluded(run_dir)) == allowed


def test_the_reason_of_an_exclusion_is_kept_and_the_nodes_join_those_given_by_hand(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    outlier = {"node": "n3", "measure": "matmul_tflops", "text": "matmul 0.21 of the median (12 of 57 TFLOP/s)"}
    write_json(run_dir.preflight / "12-0" / "report.json", {"exclude": ["n3"], "outliers": [outlier]})
    assert main(["exclude", str(run_dir.path), str(run_dir.preflight / "12-0"), "1"]) == 0
    assert main(["exclude", str(run_dir.path), str(run_dir.preflight / "12-0"), "1"]) == 1
    assert read_json(run_dir.excluded) == {"n3": "preflight: matmul 0.21 of the median (12 of 57 TFLOP/s)"}
    capsys.readouterr()
    for given, expected in (("", "n3"), ("(null)", "n3"), ("n[7-9]", "n[7-9],n3"), ("n1,n3", "n1,n3")):
        assert main(["excluded", str(run_dir.path), given]) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_a_missing_configuration_is_a_user_error_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["begin", "12", "0", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


def test_a_decision_that_cannot_be_made_is_neither_yes_nor_no(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dist_transformer.cluster.requeue", "end", f"{tmp_path}/gone", "12", "0", "1", "decide"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode not in (0, 2, 3)


def test_wrong_arguments_say_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["begin"]) == 2
    assert "expected: begin JOB ATTEMPT CONFIG_OR_RUN_FOLDER" in capsys.readouterr().err
