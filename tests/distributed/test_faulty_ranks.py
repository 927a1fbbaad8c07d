"""One rank of a real run goes wrong: its numbers, its code or its memory. What all ranks do, and with which exit code."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from running import Command, records, with_constants
from test_resume import assert_same_run

from dist_transformer.config.loading import load_config
from dist_transformer.errors import EXIT_FAILED, EXIT_USER_ERROR
from dist_transformer.files import read_json
from dist_transformer.training.engine.schedule import learning_rate

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("faulty_train.py")
SETTINGS = ("data.audit=true", "training.max_steps=24", "checkpoints.every_steps=2", "checkpoints.keep_last=20")
SOON = {"training.divergence.WINDOW_STEPS": 3, "training.divergence.PATIENCE_STEPS": 4}
"""A divergence is noticed within a test."""
LOSS_SCALE = "training.engine.engine.INITIAL_LOSS_SCALE"
FIRST_FAULTY_STEP = 6


@pytest.fixture
def faulty(command: Command) -> Callable[..., tuple[int, str, Path]]:
    """Trains on two ranks with a fault on rank 1: exit code, what was said, the run folder."""

    def train(fault: str, name: str, *overrides: str, constants: Mapping[str, object] = SOON) -> tuple[int, str, Path]:
        arguments = (fault, "1", "small.yaml", f"run.name={name}", *SETTINGS, *overrides, "2")
        code, said = command.program(PROGRAM, *arguments, **with_constants(constants))
        return code, said, command.folder / "runs" / name

    return train


def steps_of(run: Path) -> list[int]:
    return [record["step"] for record in records(run)]


def names_in(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp16")], ids=lambda value: str(value))
def test_an_infinity_on_one_rank_skips_one_update_everywhere_and_moves_nothing_else(faulty, stage, precision):
    short = ("training.max_steps=10", f"training.zero_stage={stage}", f"training.precision={precision}")
    code, said, run = faulty("infinity", f"infinity-{stage}", *short, constants={**SOON, LOSS_SCALE: 1024})
    assert code == 0, said
    found = records(run)
    assert [record["step"] for record in found] == list(range(1, 11))
    assert [record["skipped_updates"] for record in found] == [0] * 5 + [1] * 5
    config = load_config(run / "config.yaml", check_files=False)
    assert [record["learning_rate"] for record in found] == [learning_rate(config, step) for step in range(1, 11)]
    scale = 1024 if precision == "fp16" else 1
    assert [record["loss_scale"] for record in found] == [scale] * 5 + [scale / 2 if precision == "fp16" else 1] * 5


def test_gradients_that_stay_infinite_end_the_run_with_a_message_and_keep_the_last_good_checkpoint(faulty):
    code, said, run = faulty("infinities", "infinities")
    assert code == EXIT_USER_ERROR
    assert "Traceback" not in said
    (message,) = [line for line in said.splitlines() if "dist-transformer: " in line]
    assert "100 batches in a row" in message
    assert "step 4" in message
    assert names_in(run / "checkpoints", "step_????????")[-1] == "step_00000004"


def test_a_spike_of_the_loss_goes_back_to_the_checkpoint_before_it_with_a_lower_rate_and_if_that_does_not_help_further(
    faulty,
):
    code, said, run = faulty("spike twice", "spike-twice", "divergence.policy=lower_learning_rate")
    assert code == 0, said
    assert steps_of(run) == list(range(1, 25))
    events = read_json(run / "divergence.json")
    assert [event["since_step"] for event in events] == [FIRST_FAULTY_STEP] * 2
    assert [event["went_on_from"] for event in events] == [FIRST_FAULTY_STEP - 2, FIRST_FAULTY_STEP - 4]
    assert f"the return to step {FIRST_FAULTY_STEP - 2} did not help: this one goes further back" in said
    config = load_config(run / "config.yaml", check_files=False)
    expected = [learning_rate(config, step) * (1.0 if step <= FIRST_FAULTY_STEP - 4 else 0.25) for step in range(1, 25)]
    assert [record["learning_rate"] for record in records(run)] == pytest.approx(expected)
    assert len(names_in(run / "checkpoints", "*.diverged")) == 1


def test_at_the_floor_of_the_loss_scale_the_run_goes_on_in_bf16_and_so_does_a_resume(faulty, command: Command):
    settings = ("training.precision=fp16", "divergence.policy=switch_to_bf16")
    code, said, run = faulty("infinities", "floor", *settings, constants={**SOON, LOSS_SCALE: 4})
    assert code == 0, said
    assert steps_of(run) == list(range(1, 25))
    command("train", run, "training.max_steps=26")
    assert [record["loss_scale"] for record in records(run)] == [4.0] * 4 + [1.0] * 22
    assert read_json(sorted((run / "checkpoints").glob("step_????????"))[-1] / "state.json")["precision"] == "bf16"


def test_a_rank_that_raises_is_named_and_both_leave(faulty):
    code, said, run = faulty("exception", "raising")
    assert code == EXIT_FAILED
    assert "injected by the test" in said
    assert "rank 1 of 2" in said
    logged = (run / "train.log").read_text(encoding="utf-8")
    assert re.search(r"rank 1 of 2 on \S+ failed: Traceback(.*\n)+RuntimeError: injected by the test", logged)
    assert "no progress for" not in said
    assert "killed" not in said


def test_a_rank_out_of_memory_says_so_and_both_leave(faulty):
    code, said, run = faulty("memory", "memory")
    assert code == EXIT_FAILED
    out = re.compile(r"out of memory in step [0-9]+ of rank 1: .* more were asked for; .*Lower data\.max_tokens")
    assert out.search(said)
    assert out.search((run / "train.log").read_text(encoding="utf-8"))
    assert "Traceback" not in said
    assert names_in(run / "checkpoints", "step_????????")[0] == "step_00000002"  # that of step 4 may be in flight


def test_training_goes_on_while_a_rank_still_writes_its_part_of_a_checkpoint(faulty):
    code, said, run = faulty("slow disk", "slow-disk", "checkpoints.every_steps=12")
    assert code == 0, said
    lines = (run / "train.log").read_text(encoding="utf-8").splitlines()
    saved, later = (
        next(n for n, line in enumerate(lines) if text in line) for text in ("saved step_00000012", "step      15")
    )
    assert saved > later


def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before_and_the_run_ends_as_an_undisturbed_one(
    faulty, train_small
):
    expected = train_small("undisturbed-save", *SETTINGS, ranks=2, **with_constants(SOON))
    code, _, run = faulty("killed while saving", "killed-save")
    assert code == EXIT_FAILED
    assert names_in(run / "checkpoints", "step_*") == ["step_00000002", "step_00000004.tmp"]
    assert_same_run(train_small("killed-save", *SETTINGS, ranks=2, **with_constants(SOON)), expected)
