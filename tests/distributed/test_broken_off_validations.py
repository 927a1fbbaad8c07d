"""A validation that is broken off on real ranks: by a stop, after which the run ends as an undisturbed one; by a failure."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from running import Command, records
from test_resume import assert_same_run

from dist_transformer.errors import EXIT_FAILED, EXIT_REQUEUE
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("faulty_train.py")
SETTINGS = (
    "data.audit=true",
    "training.max_steps=10",
    "validation={every_steps: 2, translate: true, metric: chrf, patience: 40}",
    "decoding.max_tokens=300",
    "checkpoints={every_steps: 4, keep_last: 1, keep_best: 1, average_last: 1, final_model: average_best}",
)


@pytest.fixture
def disturbed(command: Command) -> Callable[..., tuple[int, str, Path]]:
    """Trains on two ranks with a fault in a validation of one of them: exit code, what was said, the run folder."""

    def train(name: str, fault: str, rank: int, *overrides: str) -> tuple[int, str, Path]:
        arguments = (fault, str(rank), "small.yaml", f"run.name={name}", *SETTINGS, *overrides, "2")
        return *command.program(PROGRAM, *arguments), command.folder / "runs" / name

    return train


@pytest.fixture(scope="module")
def undisturbed_in(train_small: Callable[..., Path]) -> Callable[[int], Path]:
    """The run of a ZeRO stage that nothing disturbs."""
    return cache(lambda stage: train_small(f"whole-{stage}", *SETTINGS, f"training.zero_stage={stage}", ranks=2))


def validations(run: Path) -> list[dict[str, Any]]:
    """Records of validations and samples, without the times."""
    found = records(run, "validation") + records(run, "samples", "samples.jsonl")
    return [{key: value for key, value in record.items() if key != "time"} for record in found]


def newest(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_json(checkpoints.saved(RunDir(run))[-1] / "state.json")
    return state


@pytest.mark.parametrize(
    ("stage", "rank", "stops"),
    [(3, 1, [("measuring", 2), ("search", 3)]), (1, 0, [("scoring", 5)])],
)
def test_a_stop_leaves_the_validation_saves_and_validates_first_when_it_goes_on(
    disturbed, train_small, undisturbed_in, stage, rank, stops
):
    name, zero, before = f"stopped-{stage}", f"training.zero_stage={stage}", 1
    for where, number in stops:
        fault = f"validation {number - before + 1} {where} stop"  # counted from the first one of this start
        code, said, run = disturbed(name, fault, rank, zero)
        assert code == EXIT_REQUEUE, said
        state, before = newest(run), number
        assert (state["step"], state["validation"], state["validation_due"]) == (2 * number, None, True)
        assert [record["step"] for record in records(run, "validation")] == list(range(2, 2 * number, 2))
    expected = undisturbed_in(stage)
    assert_same_run(train_small(name, *SETTINGS, zero, ranks=2), expected)
    assert validations(run) == validations(expected)
    for key in ("early_stopping", "validation", "validation_due"):
        assert before == 5 or newest(run)[key] == newest(expected)[key]
    names = [[path.name for path in checkpoints.saved(RunDir(each))] for each in (run, expected)]
    assert names[0] == names[1]


def test_a_kill_after_the_validation_was_made_up_for_does_not_make_it_twice(disturbed, train_small, undisturbed_in):
    code, said, run = disturbed("killed-later", "validation 2 search stop", 1)
    assert code == EXIT_REQUEUE, said
    code, said, run = disturbed("killed-later", "validation 1 step kill", 1)
    assert code == EXIT_FAILED, said
    assert newest(run)["validation_due"]
    before = records(run, "validation")
    assert [record["step"] for record in before] == [2, 4]
    assert_same_run(train_small("killed-later", *SETTINGS, ranks=2), undisturbed_in(1))
    assert validations(run) == validations(undisturbed_in(1))
    assert records(run, "validation")[:2] == before
    assert newest(run)["early_stopping"] == newest(undisturbed_in(1))["early_stopping"]


@pytest.mark.parametrize("made_up_by", ["former", "present"])
def test_a_validation_that_was_made_up_for_counts_only_where_it_was_measured_as_now(disturbed, train_small, made_up_by):
    """The next checkpoint is not there yet, and this one says still that its step is to be validated."""
    name, loss = f"made-up-{made_up_by}", ("validation.metric=loss", "training.label_smoothing=0.6")
    code, said, run = disturbed(name, "validation 2 search stop", 1, *loss[:1], "training.label_smoothing=0.0")
    assert code == EXIT_REQUEUE, said
    if made_up_by == "former":
        train_small(name, *SETTINGS, loss[0], "training.label_smoothing=0.0", "training.max_steps=4", ranks=2)
    else:
        code, said, run = disturbed(name, "validation 1 step kill", 1, *loss)
        assert code == EXIT_FAILED, said
    assert newest(run)["validation_due"]
    assert records(run, "validation")[-1]["step"] == 4
    before = (run / "train.log").read_text(encoding="utf-8")
    train_small(name, *SETTINGS, *loss, ranks=2)
    said = (run / "train.log").read_text(encoding="utf-8").removeprefix(before)
    assert ("step       4  best loss" in said) is (made_up_by == "present")
    assert [record["step"] for record in records(run, "validation")] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("is_in_validation", [True, False])
def test_the_last_validation_counts_for_a_checkpoint_that_an_earlier_start_wrote(
    disturbed, train_small, is_in_validation
):
    """Stopped in the validation after the last epoch, or at a step that a lower training.max_steps makes the last one."""
    name, regular = f"last-{is_in_validation}", ("validation.every_steps=4", "validation.metric=loss")
    ends = ("training.max_steps=null", "training.max_epochs=1") if is_in_validation else ("training.max_steps=6",)
    settings = (*SETTINGS, "training.log_every_steps=4", *regular)
    expected = train_small(f"whole-{name}", *settings, *ends, ranks=2)
    last = records(expected, "validation")[-1]["step"]
    assert last % 4 != 0
    fault, before = "stop", ()
    if is_in_validation:
        fault, before = f"validation {len(records(expected, 'validation'))} search stop", ends
    code, said, run = disturbed(name, fault, 1, *settings, *before)
    assert code == EXIT_REQUEUE, said
    assert newest(run)["step"] == last
    assert not newest(run)["validation_due"]
    assert_same_run(train_small(name, *settings, *ends, ranks=2), expected)
    assert validations(run) == validations(expected)
    assert f"average of step_{last:08d} " in (run / "model" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("rank", "faults"), [(1, {2: "search memory", 4: "measuring memory"}), (0, {2: "scoring disk"})], ids=str
)
def test_a_validation_that_fails_on_one_rank_is_told_and_training_goes_on_without_it(
    disturbed, undisturbed_in, rank, faults
):
    fault = ", ".join(f"validation {number} {what}" for number, what in faults.items())
    code, said, run = disturbed(f"failed-{rank}", fault, rank, "checkpoints.keep_last=5")
    assert code == 0, said
    assert [record["loss"] for record in records(run)] == [record["loss"] for record in records(undisturbed_in(1))]
    assert [record["step"] for record in records(run, "validation")] == [2 * n for n in range(1, 6) if n not in faults]
    told = records(run, "failed validation", "history.jsonl")
    assert [record["step"] for record in told] == [2 * number for number in faults]
    for record, what in zip(told, faults.values(), strict=True):
        assert f"rank {rank}: " in record["reason"]
        assert ("Input/output error" if "disk" in what else "out of memory") in record["reason"]
        assert f"validation of step {record['step']} failed, and training continues without it" in said
    assert ("Where memory was short, lower" in said) == (faults[2] != "scoring disk")
    states = {checkpoints.step_of(path): read_json(path / "state.json") for path in checkpoints.saved(RunDir(run))}
    assert [step for step in states if states[step]["validation"] is None] == [2 * number for number in faults]
    assert not any(state["validation_due"] for state in states.values())
    assert states[4]["early_stopping"]["num_since"] + bool(states[4]["early_stopping"]["best_step"]) <= 1
