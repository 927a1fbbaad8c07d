"""The whole path from shards to global batches as a property, on real parquet files."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import Ranks
from rows_helpers import manifest_of, write_token_split

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.data.loader.partition import Planner
from dist_transformer.data.loader.position import Position, position_from_json
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, batch_digest

LONGEST_TOKENS = 8
"""Of the sides that `write_token_split` makes."""

files = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=5), min_size=1, max_size=3)
corpora = st.lists(files, min_size=1, max_size=2)
starts = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), max_size=5)
"""(ranks, batches until the next stop)"""


def path_of(folder: Path, corpora, max_tokens: int, lanes: int, window_rows: int, seed: int):
    splits = {f"corpus-{n}": write_token_split(folder, f"corpus-{n}", each) for n, each in enumerate(corpora)}
    manifest = manifest_of(splits)
    reader = RowReader(folder, manifest, DataConfig(), 0.0, seed)
    builder = WindowBuilder(reader, max_tokens, manifest.special, seed)
    groups = tuple(tuple(group.rows for group in split.row_groups) for split in splits.values())
    return builder, Planner(groups, lanes, window_rows, seed)


def digests_of(batches: list[dict[int, list[int]]]) -> list[str]:
    return [batch_digest({lane: np.array(rows, np.int64) for lane, rows in batch.items()}) for batch in batches]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    corpora,
    st.integers(2 * LONGEST_TOKENS, 200),
    st.integers(1, 7),
    st.integers(1, 40),
    st.integers(0, 2**31),
    starts,
)
def test_any_chain_of_stops_on_any_ranks_gives_the_digests_of_one_undisturbed_rank_and_every_row_once(
    corpora, max_tokens, lanes, window_rows, seed, starts
):
    with tempfile.TemporaryDirectory() as name:
        builder, planner = path_of(Path(name), corpora, max_tokens, lanes, window_rows, seed)
        begin = Position.start(planner.first_partition())
        alone = Ranks(builder, planner, 1, begin, 0)
        expected = []
        while alone.position.partition.epoch == 0:
            expected.append(alone.step())
        *first_epoch, _ = expected
        used = Counter(row for batch in first_epoch for rows in batch.values() for row in rows)
        rows = [(c << CORPUS_SHIFT) + row + 1 for c, count in enumerate(planner.rows) for row in range(count)]
        assert sorted(used.elements()) == rows

        found, position = [], begin
        for num_ranks, batches in [*starts, (1, len(expected))]:
            ranks = Ranks(builder, planner, min(num_ranks, lanes), position, len(found))
            found += [ranks.step() for _ in range(min(batches, len(expected) - len(found)))]
            saved = json.dumps(ranks.position.to_json())
            position = position_from_json(json.loads(saved), "state.json")
        assert digests_of(found) == digests_of(expected)
