"""The lanes of a rank computed together: the same training."""

from pathlib import Path

import pytest
import torch
from running import records
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

NO_DROPOUT = "model.dropout=0"


def assert_same_training(run: Path, other: Path, tolerance: float) -> None:
    found, expected = records(run), records(other)
    assert [record["batch_digest"] for record in found] == [record["batch_digest"] for record in expected]
    assert [record["loss"] for record in found] == pytest.approx([r["loss"] for r in expected], rel=tolerance)


@pytest.fixture(scope="module")
def plain(train_small) -> Path:
    return train_small("plain", NO_DROPOUT)


@pytest.mark.parametrize(("ranks", "lanes"), [(1, 3), (3, 9)])
def test_joined_lanes_train_on_the_same_batches_to_the_same_losses(train_small, plain, ranks, lanes):
    joined = train_small(f"joined-{ranks}-{lanes}", NO_DROPOUT, f"training.lanes_per_pass={lanes}", ranks=ranks)
    assert_same_training(joined, plain, 1e-5)


@pytest.mark.parametrize("lanes", [3, 4])
def test_ranks_of_zero_3_with_different_numbers_of_lanes_in_a_pass_meet_in_the_same_collectives(train_small, lanes):
    """One rank has 2 of 3 lanes; some of 4 lanes have no rows left at the end of an epoch."""
    settings = (NO_DROPOUT, f"data.lanes={lanes}", "training.max_steps=24", "training.hang_seconds=60")
    joined = train_small(f"zero-3-{lanes}", *settings, "training.zero_stage=3", "training.lanes_per_pass=2", ranks=2)
    assert_same_training(joined, train_small(f"zero-1-{lanes}", *settings), 1e-4)


def test_a_run_with_joined_lanes_that_is_stopped_and_resumed_ends_with_the_same_weights(train_small):
    settings = ("training.lanes_per_pass=3", "schedule.warmup_steps=3")
    whole = train_small("joined-whole", *settings)
    train_small("joined-resumed", *settings, "training.max_steps=3")
    resumed = train_small("joined-resumed", *settings)
    weights = [load_file(next(iter(sorted(run.glob("checkpoints/step_*6/state_*"))))) for run in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
