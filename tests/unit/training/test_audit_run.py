"""The audit finds a lost, a repeated and an unknown row, and a digest that is not that of its rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from lockstep import Ranks
from rows_helpers import DataConfig, RowReader, changed_bytes, manifest_of, write_token_split

from dist_transformer.data.loader.partition import Planner, Stage
from dist_transformer.data.loader.position import Position
from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, batch_digest
from dist_transformer.data.sources import retries
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import DataError
from dist_transformer.training.audit_run import Audit

Records = list[dict[str, Any]]
STAGES = {"one pass an epoch": (Stage(0, None),), "weights": (Stage(0, (2, 1)), Stage(6, (1, 2)))}


def record(step: int, epoch: int, lanes: dict[int, list[int]]) -> dict[str, Any]:
    digest = batch_digest({lane: np.asarray(ids, dtype=np.int64) for lane, ids in lanes.items()})
    text = json.dumps({"step": step, "epoch": epoch, "batch_digest": digest, "rows": lanes})
    return dict(json.loads(text))


@pytest.fixture(params=STAGES)
def audited(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Records], None]], list[str]]:
    """The problems of 14 real batches of two corpora after they were changed."""
    splits = {"large": write_token_split(tmp_path, "large", [(9, 14), (20,)])}
    splits["small"] = write_token_split(tmp_path, "small", [(6, 5)])
    manifest = manifest_of(splits)
    groups = tuple(tuple(group.rows for group in split.row_groups) for split in splits.values())
    planner = Planner(groups, 2, 9, 5, STAGES[request.param])
    builder = WindowBuilder(RowReader(tmp_path, manifest, DataConfig(), 0.0, 5), 24, SpecialTokens(1, 2, 0), 5)
    ranks = Ranks(builder, planner, 1, Position.start(planner.first_partition()), 0)
    records = []
    for step in range(1, 15):
        lanes = ranks.step()
        records.append(record(step, ranks.position.partition.epoch, lanes))

    def problems(change: Callable[[Records], None]) -> list[str]:
        change(records)
        audit = Audit(tmp_path, manifest, has_weights=request.param == "weights", may_drop=False, quarantined=())
        for each in records:
            audit.add(each)
        return [*audit.problems(planner, ranks.position), *map(str, audit.wrong_digests)]

    return problems


def test_batches_as_they_were_planned_have_no_problem(audited):
    assert audited(lambda records: None) == []


def test_the_rows_of_a_run_are_put_together_once_and_not_for_each_corpus(audited, monkeypatch):
    joined, concatenate = [], np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda parts: joined.append(len(parts)) or concatenate(parts))
    assert audited(lambda records: joined.clear()) == []
    assert len([count for count in joined if count > 14]) == 1  # of batches, not of row groups


def test_a_lost_row_is_found(audited):
    def lose(records: Records) -> None:
        records[0] = record(1, 0, {0: records[0]["rows"]["0"][1:], 1: records[0]["rows"]["1"]})

    assert audited(lose)[0].endswith("1 rows were used less often than was due")


def test_a_repeated_row_is_found(audited):
    def repeat(records: Records) -> None:
        rows = records[0]["rows"]
        records[0] = record(1, 0, {0: [*rows["0"], rows["0"][0]], 1: rows["1"]})

    assert audited(repeat)[0].endswith("1 rows were used more often than was due")


def test_a_row_that_no_corpus_has_is_found(audited):
    def invent(records: Records) -> None:
        rows = records[0]["rows"]
        records[0] = record(1, 0, {0: [*rows["0"], (1 << CORPUS_SHIFT) + 99], 1: rows["1"]})

    assert audited(invent) == ["small: 1 rows that the corpus does not have"]


def test_rows_that_do_not_fit_their_digest_are_found(audited):
    def swap_lanes(records: Records) -> None:
        rows = records[6]["rows"]
        records[6]["rows"] = {"0": rows["1"], "1": rows["0"]}

    assert audited(swap_lanes) == ["7"]


def test_rows_are_counted_by_epoch_and_with_weights_through_the_whole_run(tmp_path: Path):
    manifest = manifest_of({name: write_token_split(tmp_path, name, [(4,)]) for name in ("large", "small")})
    once = "rows, each once"
    for has_weights, expected in (
        (False, [f"epoch 0, large: 1 of 4 {once}", f"epoch 0, small: 2 of 4 {once}", f"epoch 1, large: 1 of 4 {once}"]),
        (True, [f"whole run, large: 2 of 4 {once}", "whole run, small: 2 of 4 rows, at most 2 times each"]),
    ):
        audit = Audit(tmp_path, manifest, has_weights, may_drop=False, quarantined=())
        audit.add(record(1, 0, {0: [1, (1 << CORPUS_SHIFT) + 1, (1 << CORPUS_SHIFT) + 2]}))
        audit.add(record(2, 1, {0: [2, (1 << CORPUS_SHIFT) + 1]}))
        assert list(audit.usages())[: len(expected)] == expected


def test_rows_of_a_quarantined_row_group_are_not_read_and_an_unreadable_one_is_named_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    manifest = manifest_of({name: write_token_split(tmp_path, name, [(4, 3), (2,)]) for name in ("large", "small")})
    rows = [*range(4), *range(7, 9)]  # of "small" the second row group is left out
    planner = Planner(((4, 3, 2),) * 2, 1, 99, 5, STAGES["one pass an epoch"])
    position = Position.start(planner.first_partition())
    path = tmp_path / manifest.splits["small"].shards[0].file
    page = pq.ParquetFile(path).metadata.row_group(1).column(0)
    first = page.dictionary_page_offset or page.data_page_offset
    with changed_bytes(path, first, first + page.total_compressed_size):
        audit = Audit(tmp_path, manifest, False, True, {(1, 1)})
        audit.add(record(1, 0, {0: [(1 << CORPUS_SHIFT) + row for row in rows]}))
        assert "epoch 0, small: 6 of 9 rows, each once" in [*audit.usages()]
        assert not any("does not have" in problem for problem in audit.problems(planner, position))
        with pytest.raises(DataError, match=rf"row group 1 of {path} cannot be read \(.+\); restore the file"):
            Audit(tmp_path, manifest, False, True, {(0, 1)})
    path.unlink()
    assert [*Audit(tmp_path, manifest, False, True, {(1, 0), (1, 1), (1, 2)}).usages()] == []
