"""The audit finds a lost, a repeated and an unknown row, and a digest that is not that of its rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows_helpers import manifest_of, write_token_split

from dist_transformer.data.audit import Audit, Usage
from dist_transformer.data.plan import batch_digest

ROWS = list(range(1, 13))
"""The row numbers that `write_token_split` gives to twelve rows."""


def record(step: int, epoch: int, *lanes: list[int]) -> dict[str, Any]:
    rows = {lane: np.asarray(ids, dtype=np.int64) for lane, ids in enumerate(lanes)}
    return {
        "step": step,
        "epoch": epoch,
        "batch_digest": batch_digest(rows),
        "rows": {str(lane): ids.tolist() for lane, ids in rows.items()},
    }


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    manifest = manifest_of({"train": write_token_split(tmp_path, "train", [(5, 3), (4,)])})
    return Audit(tmp_path, manifest, has_weights=False, may_drop=False)


def problems(audit: Audit) -> list[str | None]:
    return [usage.problem for usage in audit.usages()]


def test_every_row_once_in_a_finished_epoch_and_some_once_in_the_last_is_as_it_should_be(audit):
    audit.add(record(1, 0, ROWS[:5], ROWS[5:9]))
    audit.add(record(2, 0, ROWS[9:]))
    audit.add(record(3, 1, ROWS[2:4]))
    assert list(audit.usages()) == [Usage("train", 0, True, 12, 12, 1, 0), Usage("train", 1, False, 12, 2, 1, 0)]
    assert problems(audit) == [None, None]
    assert audit.wrong_digests == []


def test_a_lost_row_is_found_once_the_epoch_is_over(audit):
    audit.add(record(1, 0, ROWS[1:]))
    assert problems(audit) == [None]
    assert [usage.problem for usage in audit.usages(num_finished=1)] == ["1 rows were not used"]
    audit.add(record(2, 1, ROWS[:1]))
    assert problems(audit) == ["1 rows were not used", None]


def test_a_repeated_row_is_found(audit):
    audit.add(record(1, 0, ROWS[:3], ROWS[2:4]))
    assert problems(audit) == ["a row was used 2 times"]


def test_a_row_that_the_corpus_does_not_have_is_found(audit):
    audit.add(record(1, 0, [1, 99]))
    assert problems(audit) == ["1 rows that the corpus does not have"]


def test_rows_that_do_not_fit_their_digest_are_found(audit):
    changed = record(7, 0, ROWS[:3])
    changed["rows"]["0"][1] = 9
    audit.add(changed)
    assert audit.wrong_digests == [7]


def test_with_weights_passes_are_counted_through_the_whole_run(tmp_path: Path):
    manifest = manifest_of({name: write_token_split(tmp_path, name, [(4,)]) for name in ("large", "small")})
    audit = Audit(tmp_path, manifest, has_weights=True, may_drop=False)
    small = [(1 << 44) + row for row in (1, 2, 3, 4)]
    audit.add(record(1, 0, [1, *small]))
    audit.add(record(2, 1, [2, small[0]]))
    assert [(u.corpus, u.epoch, u.used, u.most) for u in audit.usages()] == [
        ("large", None, 2, 1),
        ("small", None, 4, 2),
    ]
    assert problems(audit) == [None, None]
