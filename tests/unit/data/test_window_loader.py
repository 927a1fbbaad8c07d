"""Windows and the loader on a really prepared corpus: exactly once, elastic, resumable."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from dist_transformer.config.loading import load_config
from dist_transformer.data.loader import LaneLoader, Position, WindowSource, validation_batches
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare import load_tokenizer, prepare
from dist_transformer.data.window import WindowReader
from dist_transformer.errors import DataError

LANES = 4


@pytest.fixture(scope="module")
def prepared(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("windows") / "prepared"
    return folder, prepare(load_config(small_corpus / "small.yaml"), folder)


@pytest.fixture(scope="module")
def source(prepared: tuple[Path, Manifest]) -> WindowSource:
    folder, manifest = prepared
    groups = tuple(group.rows for group in manifest.splits["train"].row_groups)
    return WindowSource(WindowReader(folder, manifest, "train"), groups, LANES, 60, 512, seed=3)


def loaders(source: WindowSource, num_ranks: int, position: Position, num_workers: int = 0) -> list[LaneLoader]:
    return [LaneLoader(source, range(r, LANES, num_ranks), position, 1, num_workers, 60) for r in range(num_ranks)]


def steps(ranks: list[LaneLoader], num_epochs: int, num_steps: int | None = None) -> list[tuple[int, dict]]:
    """(epoch, {lane: row ids}) of each global step, as the training loop goes through them."""
    found: list[tuple[int, dict]] = []
    while ranks[0].epoch < num_epochs and len(found) != num_steps:
        batches = [b for rank in ranks for b in rank.next_step() if b is not None]
        if batches:
            found.append((ranks[0].epoch, {b.lane: b.row_ids.tolist() for b in batches}))
        else:
            for rank in ranks:
                rank.start_epoch()
    return found


def position_of(ranks: list[LaneLoader]) -> Position:
    lanes = {lane: place for rank in ranks for lane, place in rank.lane_positions().items()}
    return Position(ranks[0].epoch, tuple(lanes[lane] for lane in range(LANES)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_an_epoch_uses_every_kept_row_once_on_any_number_of_ranks(source, prepared, num_ranks):
    found = steps(loaders(source, num_ranks, Position.start(LANES)), 2)
    for epoch in (0, 1):
        rows = Counter(row for e, lanes in found if e == epoch for ids in lanes.values() for row in ids)
        assert len(rows) == prepared[1].splits["train"].rows
        assert set(rows.values()) == {1}


def test_global_batches_are_the_same_on_any_number_of_ranks(source):
    alone = steps(loaders(source, 1, Position.start(LANES)), 2)
    for num_ranks in (2, 3, 4):
        assert steps(loaders(source, num_ranks, Position.start(LANES)), 2) == alone


def test_a_chain_of_stops_on_changing_numbers_of_ranks_loses_and_repeats_nothing(source):
    whole = steps(loaders(source, 1, Position.start(LANES)), 2)
    position, found = Position.start(LANES), []
    for num_ranks, num_steps in ((2, 3), (3, 1), (1, 5), (4, 2), (2, 7), (3, None)):
        ranks = loaders(source, num_ranks, position)
        found += steps(ranks, 2, num_steps)
        position = position_of(ranks)
    assert found == whole


@pytest.mark.slow
def test_loader_processes_change_nothing(source):
    alone = steps(loaders(source, 1, Position.start(LANES)), 2, 12)
    assert steps(loaders(source, 2, Position.start(LANES), num_workers=1), 2, 12) == alone


def test_the_decoder_input_is_the_target_behind_a_begin_of_sentence(source, prepared):
    folder, manifest = prepared
    tokenizer = load_tokenizer(folder, manifest.tokenizer)
    batch = loaders(source, 1, Position.start(LANES))[0].next_step()[0]
    assert batch is not None
    assert (batch.target_in_BT[:, 0] == manifest.bos_id).all()
    assert torch.equal(batch.target_in_BT[:, 1:], batch.target_out_BT[:, :-1])
    real = batch.target_out_BT != manifest.pad_id
    assert real.sum() == batch.shape.target_tokens
    assert all(row[row != manifest.pad_id][-1] == manifest.eos_id for row in batch.target_out_BT)
    assert all(tokenizer.decode_target(row.tolist()) for row in batch.target_out_BT)


def test_rows_carry_the_text_of_their_row_number(source, prepared, small_corpus):
    folder, manifest = prepared
    tokenizer = load_tokenizer(folder, manifest.tokenizer)
    english = (small_corpus / "train.en").read_text(encoding="utf-8").split("\n")
    german = (small_corpus / "train.de").read_text(encoding="utf-8").split("\n")
    for batch in loaders(source, 1, Position.start(LANES))[0].next_step():
        for row, source_ids, target_ids in zip(batch.row_ids, batch.source_BS, batch.target_out_BT, strict=True):
            assert tokenizer.decode_source(source_ids.tolist()) == english[row]
            assert tokenizer.decode_target(target_ids.tolist()) == german[row]


def test_validation_batches_hold_every_row_once(prepared):
    folder, manifest = prepared
    batches = list(validation_batches(WindowReader(folder, manifest, "validation"), 512, manifest.bos_id))
    rows = [row for batch in batches for row in batch.row_ids.tolist()]
    assert sorted(rows) == list(range(40))
    assert all(batch.shape.padded_tokens <= 512 for batch in batches)


def test_a_damaged_shard_is_named_with_its_row_group(source, prepared, tmp_path):
    folder, manifest = prepared
    shard = manifest.splits["train"].shards[0].file
    copy = tmp_path / shard
    copy.parent.mkdir(parents=True)
    content = bytearray((folder / shard).read_bytes())
    content[40:400] = bytes(360)
    copy.write_bytes(content)
    broken = WindowSource(WindowReader(tmp_path, manifest, "train"), source.group_rows, LANES, 60, 512, seed=3)
    with pytest.raises(DataError, match=r"row group \d+ cannot be read .*run `dist-transformer prepare` again"):
        steps(loaders(broken, 1, Position.start(LANES)), 1)
