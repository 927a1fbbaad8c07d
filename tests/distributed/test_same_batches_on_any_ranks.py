"""P1 and P2 on real gloo ranks: the same global batches, every row once, on 1, 2 and 3 ranks; 4: test_chain_of_kills.py."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from running import records

pytestmark = pytest.mark.slow

ONE_EPOCH = ("training.max_epochs=1", "training.max_steps=null", "data.audit=true", "model.dropout=0.1")


@pytest.fixture(scope="module")
def alone(train_small: Callable[..., Path]) -> Path:
    return train_small("audit-1", *ONE_EPOCH)


def test_an_epoch_uses_every_row_once(alone, small_corpus):
    rows = Counter(row for r in records(alone, "batch", "audit.jsonl") for ids in r["rows"].values() for row in ids)
    assert sorted(rows) == list(range(600))
    assert set(rows.values()) == {1}


@pytest.mark.parametrize(("num_ranks", "overrides"), [(2, ["data.loader_workers=1"]), (3, [])])
def test_digests_rows_and_losses_equal_those_of_one_rank(alone, train_small, num_ranks, overrides):
    run = train_small(f"audit-{num_ranks}", *ONE_EPOCH, *overrides, ranks=num_ranks)
    expected, found = records(alone), records(run)
    assert [r["batch_digest"] for r in found] == [r["batch_digest"] for r in expected]
    assert [r["rows"] for r in records(run, "batch", "audit.jsonl")] == [
        r["rows"] for r in records(alone, "batch", "audit.jsonl")
    ]
    # Dropout is seeded by lane, so that even with it only the order of float sums differs.
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    assert [r["gradient_norm"] for r in found] == pytest.approx([r["gradient_norm"] for r in expected], rel=1e-2)


def test_more_ranks_than_lanes_is_refused_with_both_numbers(command):
    said = command("train", "small.yaml", "run.name=too-many", "--ranks", 5, code=2)
    assert "5 ranks, but data.lanes is 4" in said
    assert "Traceback" not in said
