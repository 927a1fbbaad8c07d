"""A rank of a real run holds or computes something wrong, and no number shows it: it is found, named, and undone."""

import platform
from pathlib import Path

import pytest
from running import Command, records
from silent_program import FLIPS, KINDS, launch
from test_resume import assert_same_run

from dist_transformer.errors import EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR
from dist_transformer.files import read_json

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("faulty_train.py")
SETTINGS = ("data.audit=true", "training.max_steps=12", "checkpoints.every_steps=2", "checkpoints.keep_last=20")


def train(command: Command, fault: str, name: str, *overrides: str) -> tuple[int, str, Path]:
    """Trains on two ranks with a fault on rank 1: exit code, what was said, the run folder."""
    arguments = (fault, "1", "small.yaml", f"run.name={name}", *SETTINGS, *overrides, "2")
    return *command.program(PROGRAM, *arguments), command.folder / "runs" / name


def faults_of(run: Path) -> list[dict[str, object]]:
    return records(run, "fault", "history.jsonl")


def test_every_flipped_bit_in_weights_moments_and_gradients_is_found_and_its_rank_named(command, tmp_path):
    flips = launch(command, tmp_path)
    assert len(flips) == FLIPS
    assert {flip.kind for flip in flips} == {*KINDS}
    assert [flip for flip in flips if flip.named != [flip.rank]] == []


@pytest.mark.parametrize("stage", [1, 2])
def test_wrong_gradients_are_found_and_computed_again_so_that_the_run_ends_as_an_undisturbed_one(
    command, train_small, stage
):
    settings = (f"training.zero_stage={stage}", "training.audit_share=1.0")
    code, said, run = train(command, "wrong gradients", f"wrong-{stage}", *settings)
    assert code == 0, said
    found = faults_of(run)
    assert len(found) > 1
    assert {(fault["rank"], fault["node"]) for fault in found} == {(1, platform.node())}
    assert "rank 1 on" in said
    assert_same_run(run, train_small(f"right-{stage}", *SETTINGS, f"training.zero_stage={stage}", ranks=2))


def test_a_node_that_computes_wrongly_a_second_time_is_excluded_and_the_run_saves_and_leaves_it(command):
    (command.folder / "runs" / "excluding" / "slurm").mkdir(parents=True)
    code, said, run = train(command, "wrong gradients", "excluding", "training.audit_share=1.0")
    assert code == EXIT_REQUEUE, said
    steps = [fault["step"] for fault in faults_of(run)]
    assert len(steps) >= 2
    excluded = read_json(run / "slurm" / "excluded.json")
    assert {*excluded} == {platform.node()}
    assert excluded[platform.node()].startswith(f"step {steps[1]}: it computed another gradient")
    newest = max(path.name for path in (run / "checkpoints").glob("step_????????"))
    assert int(newest.removeprefix("step_")) <= steps[-1] + 1


def test_ranks_that_hold_other_weights_save_nothing_and_the_next_start_ends_as_an_undisturbed_run(command, train_small):
    code, said, run = train(command, "flipped weight", "flipped", "training.zero_stage=0")
    assert code == EXIT_FAILED, said
    assert "step 6: rank 0 on" in said
    assert f"rank 1 on {platform.node()}: it holds other" in said
    assert "Traceback" not in said
    assert [fault["rank"] for fault in faults_of(run)] == [0, 1]  # of two ranks either may be the wrong one
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_00000002", "step_00000004"]
    assert_same_run(train_small("flipped", *SETTINGS, "training.zero_stage=0", ranks=2),
                    train_small("right-0", *SETTINGS, "training.zero_stage=0", ranks=2))  # fmt: skip


def test_unlike_machines_that_round_updates_otherwise_are_told_of_and_no_node_is_named(command):
    code, said, run = train(command, "other machine", "unlike", "training.zero_stage=0")
    assert code == EXIT_FAILED, said
    assert "ranks hold different weights and moments: with training.zero_stage: 0 each rank computes the update" in said
    assert "DEFAULT) may round it otherwise; set it to 1, or give all ranks one kind. Nothing of it was saved" in said
    assert platform.node() not in said
    assert faults_of(run) == []
    assert "machines   with training.zero_stage: 0" in (run / "train.log").read_text(encoding="utf-8")
    muon = ("optimizer.matrices=muon", "training.zero_stage=0")
    code, said, run = train(command, "other machine", "unlike-muon", *muon)
    assert code == EXIT_USER_ERROR, said
    assert "optimizer.matrices: muon: with training.zero_stage: 0" in said
    assert "Traceback" not in said


def test_an_audit_changes_no_bit_of_a_run_and_raises_no_alarm(train_small):
    """On three ranks, of which two have a lane less than the third."""
    run = train_small("audited", *SETTINGS, "training.audit_share=0.5", ranks=3)
    assert faults_of(run) == []
    assert "audit      of 0.5 of the micro-batches, bit by bit" in (run / "train.log").read_text(encoding="utf-8")
    assert_same_run(run, train_small("not-audited", *SETTINGS, ranks=3))
