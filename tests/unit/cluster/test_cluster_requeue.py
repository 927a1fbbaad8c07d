"""The decision after each attempt of a job."""

import errno
import math
from pathlib import Path

import pytest
from stuttering_disk import FOR_GOOD, stuttering

from dist_transformer.cluster import requeue
from dist_transformer.cluster.requeue import (
    Decision,
    NextNodes,
    begin,
    end,
    next_nodes,
    nodes_to_exclude,
    run_folder,
    save_time,
)
from dist_transformer.config.slurm_schema import LOST_ATTEMPTS
from dist_transformer.errors import MachineError, UserError
from dist_transformer.files import write_json
from dist_transformer.run.attempts import attempts, newest_checkpoint
from dist_transformer.run.excluded_nodes import exclude, excluded_nodes, reasons_of_preflight
from dist_transformer.run.folder import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.slurm.mkdir(parents=True)
    return run_dir


def decide(run_dir: RunDir, exit_code: int, max_restarts: int, left: NextNodes | None = None) -> Decision:
    """The decision, which is counted as `end` does it."""
    decision = requeue.decide(run_dir, exit_code, max_restarts, left)
    if decision.count is not None:
        write_json(run_dir.restarts, decision.count)
    return decision


def _checkpoint(run_dir: RunDir, name: str) -> None:
    (run_dir.checkpoints / name).mkdir(parents=True)


@pytest.mark.parametrize("code", [0, 2])
def test_a_finished_run_and_a_user_error_are_never_requeued(run_dir: RunDir, code: int) -> None:
    assert decide(run_dir, code, max_restarts=3).then != "requeue"
    assert not run_dir.restarts.exists()


@pytest.mark.parametrize("code", [75, 1, 70, 137])
def test_without_a_new_checkpoint_the_job_is_requeued_max_restarts_times(run_dir: RunDir, code: int) -> None:
    assert [decide(run_dir, code, max_restarts=3).then == "requeue" for _ in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_new_checkpoint_begins_a_new_count(run_dir: RunDir) -> None:
    for step in range(1, 8):
        _checkpoint(run_dir, f"step_{step:08d}")
        assert decide(run_dir, 1, max_restarts=2).then == "requeue"
        assert decide(run_dir, 1, max_restarts=2).then == "requeue"
        assert decide(run_dir, 1, max_restarts=2).then != "requeue"


def test_a_suspension_uses_up_no_restart_but_gives_none_back(run_dir: RunDir) -> None:
    stops = (0.0, 29.0, 31.0, 3600.0, 0.0, 31.0, 0.0)
    decisions = []
    for stopped in stops:
        decisions.append(requeue.decide(run_dir, 1, 3, None, stopped))
        if decisions[-1].count is not None:
            write_json(run_dir.restarts, decisions[-1].count)
    assert [each.then for each in decisions] == ["requeue"] * 6 + ["stop"]
    assert (
        decisions[3].reason
        == "begins again, as there is no checkpoint yet; the job was suspended for 3600 s; restart 2 of 3 without a new one"
    )
    assert decisions[4].reason.endswith("restart 3 of 3 without a new one")


def test_a_job_that_fails_at_the_same_place_ends_also_where_each_attempt_is_suspended(run_dir: RunDir) -> None:
    decisions = []
    while not decisions or decisions[-1].count is not None:
        decisions.append(requeue.decide(run_dir, 1, 2, requeue.NextNodes(("n1",), ""), 31.0))
        write_json(run_dir.restarts, decisions[-1].count or {})
    assert len(decisions) == LOST_ATTEMPTS * 2 + 2 + 1


def test_an_unfinished_checkpoint_is_no_progress(run_dir: RunDir) -> None:
    _checkpoint(run_dir, "step_00000010")
    assert decide(run_dir, 1, max_restarts=1).then == "requeue"
    _checkpoint(run_dir, "step_00000020.tmp")
    assert newest_checkpoint(run_dir) == "step_00000010"
    assert decide(run_dir, 1, max_restarts=1).then != "requeue"


def test_a_disk_that_does_not_answer_neither_forgets_restarts_nor_excluded_nodes(run_dir: RunDir) -> None:
    exclude(run_dir, {"n1": "bad"}, 40, 9)
    assert decide(run_dir, 1, max_restarts=1).then == "requeue"
    kept = {run_dir.restarts.name, run_dir.excluded.name}
    with stuttering(errno.EIO, kept, FOR_GOOD):
        with pytest.raises(MachineError, match=f"{run_dir.restarts}: cannot be read now"):
            decide(run_dir, 1, max_restarts=1)
        with pytest.raises(MachineError, match=f"{run_dir.excluded}: cannot be read now"):
            exclude(run_dir, {"n2": "bad"}, 40, 9)
        assert excluded_nodes(run_dir) == {}, "those who look are not kept waiting"
    with stuttering(errno.EIO, kept):
        assert decide(run_dir, 1, max_restarts=1).then == "stop"
        assert exclude(run_dir, {"n2": "bad"}, 40, 9) == {"n2": "bad"}
    assert [*excluded_nodes(run_dir)] == ["n1", "n2"]


def test_the_newest_checkpoint_is_the_one_with_the_highest_step(run_dir: RunDir) -> None:
    for name in ("step_99999999", "step_100000000", "latest"):
        _checkpoint(run_dir, name)
    assert newest_checkpoint(run_dir) == "step_100000000"


def test_a_run_stopped_by_its_stop_file_stays_stopped(run_dir: RunDir) -> None:
    run_dir.stop_file.touch()
    decision = decide(run_dir, 75, max_restarts=3)
    assert decision.then != "requeue"
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


ALL_NODES = NextNodes(("n1", "n2"), words="")
FEWER_NODES = NextNodes(("n1",), words="n2 gives no answer")


def test_ranks_start_again_in_the_same_job_after_a_new_checkpoint_and_else_on_other_nodes_only(run_dir: RunDir) -> None:
    decisions = [decide(run_dir, 1, 4, nodes).then for nodes in (ALL_NODES, ALL_NODES, FEWER_NODES, None, FEWER_NODES)]
    assert decisions == ["again", "requeue", "again", "requeue", "stop"]
    _checkpoint(run_dir, "step_00000010")
    decision = decide(run_dir, 137, 4, FEWER_NODES)
    assert (decision.then, decision.reason) == ("again", "on n1 (n2 gives no answer): resumes from step_00000010")


@pytest.mark.parametrize("code", [0, 2])
def test_what_a_restart_cannot_change_is_not_started_again(run_dir: RunDir, code: int) -> None:
    assert decide(run_dir, code, 3, FEWER_NODES).then == "stop"


N = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("before", "answering", "suspects", "wanted", "expected"),
    [
        (N, N, (), 4, NextNodes(N, "")),
        (N, ("n1", "n3", "n4"), (), 4, NextNodes(("n1", "n3", "n4"), "n2 gives no answer")),
        (N[:3], N, (), 3, NextNodes(N[:3], "")),  # n4 is a spare one
        (N[:3], ("n1", "n3", "n4"), (), 3, NextNodes(("n1", "n3", "n4"), "n2 gives no answer")),
        (N, N, ("n2",), 4, NextNodes(("n1", "n3", "n4"), "ranks failed on n2 twice")),
        (N, ("n1", "n2", "n3"), ("n2",), 4,
         NextNodes(("n1", "n3"), "ranks failed on n2 twice and n4 gives no answer")),
        (N, ("n1",), (), 4, None),
        (N[:2], ("n1",), (), 2, NextNodes(("n1",), "n2 gives no answer")),
        (N[:1], (), (), 1, None),
    ],
)  # fmt: skip
def test_the_next_ranks_have_the_nodes_that_answer_up_to_the_wanted_number_and_at_least_half_of_it(
    before: tuple[str, ...],
    answering: tuple[str, ...],
    suspects: tuple[str, ...],
    wanted: int,
    expected: NextNodes | None,
) -> None:
    assert next_nodes(before, N, answering, suspects, wanted) == expected


def test_ranks_save_before_the_end_of_the_job_if_slurm_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIST_TRANSFORMER_SIGNAL_SECONDS", raising=False)
    assert save_time("1700000000") == 1700000000 - 180
    monkeypatch.setenv("DIST_TRANSFORMER_SIGNAL_SECONDS", "600")
    assert save_time("1700000000") == 1700000000 - 600
    assert {save_time(end) for end in ("", "0", "Unknown", "2026-01-01T00:00:00")} == {math.inf}


def test_before_there_is_a_configuration_the_default_limit_counts(run_dir: RunDir) -> None:
    decisions = [end(run_dir, "12", 0, 1, "decide").then for _ in range(4)]
    assert decisions == ["requeue", "requeue", "requeue", "stop"]


def test_each_attempt_leaves_a_record_of_its_beginning_and_its_end(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    begin(run_dir, "12_3", 0)
    end(run_dir, "12_3", 0, 75, "decide")
    with run_dir.attempts.open("a") as file:
        file.write('{"event": "ended", "torn')
    begin(run_dir, "12_3", 1)
    kept = [{key: r[key] for key in r if key not in ("time", "newest", "reason")} for r in attempts(run_dir)]
    assert kept == [
        {"event": "began", "job": "12_3", "attempt": 0, "nodes": "n[1-2]", "ranks": 4},
        {"event": "ended", "job": "12_3", "attempt": 0, "exit_code": 75, "how": "decide", "requeued": True},
        {"event": "began", "job": "12_3", "attempt": 1, "nodes": "n[1-2]", "ranks": 4},
    ]


def test_a_decision_whose_record_failed_is_made_again_and_counts_once(run_dir: RunDir) -> None:
    run_dir.attempts.mkdir()
    for _ in range(4):
        with pytest.raises(OSError, match="Is a directory"):
            end(run_dir, "12", 0, 1, "decide")
    run_dir.attempts.rmdir()
    assert [end(run_dir, "12", 0, 1, "decide").then for _ in range(4)] == ["requeue", "requeue", "requeue", "stop"]


def test_a_reason_with_an_odd_line_separator_is_still_one_record(run_dir: RunDir) -> None:
    record = '{"event": "ended", "time": 1.0, "job": "7", "reason": "one\u2028two\x85three"}'
    run_dir.attempts.write_text(f"{record}\n", encoding="utf-8")
    assert [record.get("reason") for record in attempts(run_dir)] == ["one\u2028two\x85three"]


@pytest.mark.parametrize("code", [1, 75, 143])
def test_what_a_person_or_slurm_has_ended_is_not_requeued(run_dir: RunDir, code: int) -> None:
    assert end(run_dir, "12", 0, code, "ended").then == "stop"
    assert not run_dir.restarts.exists()


def test_attempts_that_end_without_a_word_are_given_up_in_the_end_unless_there_is_progress(run_dir: RunDir) -> None:
    run_dir.config.write_text("data: {train: {demo: train}}\nslurm: {max_restarts_without_progress: 2}\n")
    for attempt in range(9):
        begin(run_dir, "12", attempt)
    with pytest.raises(
        MachineError, match="9 attempts of job 12 began after checkpoint None and made no other; given up"
    ):
        begin(run_dir, "12", 9)
    _checkpoint(run_dir, "step_00000010")
    begin(run_dir, "12", 10)
    begin(run_dir, "13", 0)


def _exclude(run_dir: RunDir, nodes: list[str], num_nodes: int, spare: int) -> None:
    write_json(run_dir.preflight / "report.json", {"exclude": nodes, "outliers": []})
    exclude(run_dir, reasons_of_preflight(run_dir.preflight / "report.json"), num_nodes, spare)


@pytest.mark.parametrize(("spare", "allowed"), [(0, 0), (1, 1), (2, 2), (9, 4)])
def test_no_node_is_excluded_that_the_partition_cannot_spare(run_dir: RunDir, spare: int, allowed: int) -> None:
    _exclude(run_dir, [f"n{n}" for n in range(6)], 40, spare)
    assert len(excluded_nodes(run_dir)) == allowed


@pytest.mark.parametrize(("num_nodes", "allowed"), [(2, 1), (9, 1), (20, 2), (128, 12)])
def test_a_preflight_excludes_a_tenth_of_the_nodes_at_most_over_all_attempts(
    run_dir: RunDir, num_nodes: int, allowed: int
) -> None:
    for attempt in range(3):
        _exclude(run_dir, [f"n{number}" for number in range(attempt * 6, attempt * 6 + 6)], num_nodes, 100)
    assert len(excluded_nodes(run_dir)) == allowed


def test_the_reason_of_an_exclusion_is_kept_and_the_nodes_join_those_given_by_hand(run_dir: RunDir) -> None:
    outlier = {"node": "n3", "measure": "matmul_tflops", "text": "matmul 0.21 of the median (12 of 57 TFLOP/s)"}
    report = run_dir.preflight / "report.json"
    write_json(report, {"exclude": ["n3"], "outliers": [outlier]})
    added = exclude(run_dir, reasons_of_preflight(report), 2, 1)
    assert added == {"n3": "preflight: matmul 0.21 of the median (12 of 57 TFLOP/s)"}
    assert exclude(run_dir, reasons_of_preflight(report), 2, 1) == {}
    assert excluded_nodes(run_dir) == added
    assert [nodes_to_exclude(run_dir, given) for given in ("", "(null)", "n7,n[9-10]")] == ["n3", "n3", "n7,n[9-10],n3"]


def test_a_batch_script_without_arguments_says_what_it_expects() -> None:
    with pytest.raises(
        UserError, match=r"expected a YAML file or a run folder, got no argument: .*train\.sbatch CONFIG"
    ):
        run_folder([])
