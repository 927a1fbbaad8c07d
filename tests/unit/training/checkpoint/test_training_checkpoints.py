"""Checkpoints: the same state for every stage and number of ranks, and which of them are kept."""

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from checkpoint_helpers import RUN_ID, SHAPES, MemoryEngine, rewrite, save, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_transformer.config.schema import CheckpointConfig
from dist_transformer.errors import CheckpointError
from dist_transformer.files import write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints, retention
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.checkpoint.checkpoints import folder_name, step_of
from dist_transformer.training.checkpoint.tensor_files import (
    StateFiles,
    Weights,
    add_validation,
    file_name,
    validation_of,
    write_state_file,
)


def a_step(engine, batch, learning_rate=1e-2):
    loss, _ = engine(*batch)
    engine.backward(loss, 20)
    engine.step(learning_rate)
    return float(loss.detach())


def save_engine(run_dir, engine, ranks, step):
    run_dir.path.mkdir(exist_ok=True)
    saver = AsyncWriter(run_dir, ranks, lambda doing: None)
    saver.begin(engine, state_of(step, scaler=engine.scaler_state()))
    assert saver.finish().problem is None


def names(paths):
    return [checkpoints.step_of(path) for path in paths]


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(0, 1), (1, 0), (1, 1), (1, 3), (2, 3), (3, 2), (3, 0), (3, 3)])
def test_a_checkpoint_of_any_stage_goes_on_in_any_other(run_dir, make_engine, ranks, batches, saved_by, loaded_by):
    engine = make_engine(zero_stage=saved_by)
    for batch in batches[:3]:
        a_step(engine, batch)
    save_engine(run_dir, engine, ranks, 3)
    expected = [a_step(engine, batch) for batch in batches[3:6]]
    other = make_engine(zero_stage=loaded_by, seed=99)
    checkpoints.load(checkpoints.newest_complete(run_dir, RUN_ID), other)
    assert [a_step(other, batch) for batch in batches[3:6]] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_moments_and_loss_scale_survive_in_short_precisions(run_dir, make_engine, ranks, batches, precision):
    engine = make_engine(precision=precision, initial_loss_scale=256, loss_scale_window=2)
    for batch in batches[:3]:
        a_step(engine, batch)
    save_engine(run_dir, engine, ranks, 3)
    expected = [a_step(engine, batch) for batch in batches[3:6]]
    other = make_engine(precision=precision, initial_loss_scale=4, loss_scale_window=2, seed=99)
    checkpoints.load(checkpoints.newest_complete(run_dir, RUN_ID), other)
    assert [a_step(other, batch) for batch in batches[3:6]] == expected
    assert other.loss_scale() == engine.loss_scale()


@pytest.mark.parametrize("frozen", [(), ("encoder_layers.*",)])
def test_what_was_frozen_is_trained_and_averaged_from_its_weights_on(run_dir, make_engine, ranks, batches, frozen):
    """A checkpoint has no moving average of frozen parameters: its sum of bits is not that of all."""
    engine = make_engine(zero_stage=1, ema_decay=0.9, freeze=frozen)
    a_step(engine, batches[0])
    save_engine(run_dir, engine, ranks, 1)
    other = make_engine(zero_stage=1, ema_decay=0.9, seed=99)
    checkpoints.load(checkpoints.newest_complete(run_dir, RUN_ID), other)
    held = {(fragment.part, fragment.name): fragment.values for fragment in other.fragments()}
    averages = [name for part, name in held if part == "ema" and name.startswith("encoder_layers.")]
    assert averages
    assert all(torch.equal(held["ema", n], held["weight", n]) == bool(frozen) for n in averages)


def test_a_checkpoint_of_another_model_names_what_differs(run_dir):
    save(run_dir, 3)
    checkpoint = checkpoints.newest_complete(run_dir, RUN_ID)
    for shapes in ({**SHAPES, "embedding": (3, 7)}, {**SHAPES, "another": (1,)}, {"scale": (), "norm.gain": (5,)}):
        engine = MemoryEngine(0)
        engine.shapes = shapes.copy
        with pytest.raises(CheckpointError, match=r"another model: (embedding|another) has shape"):
            checkpoints.load(checkpoint, engine)
        assert engine.loaded_step is None


def test_weights_alone_are_read_by_parameter_name(run_dir):
    save(run_dir, 3, num_ranks=3)
    weights, engine = Weights(run_dir.checkpoints / "step_00000003"), MemoryEngine(3)
    assert weights.keys() == SHAPES.keys()
    for name, tensor in engine.tensors["weight"].items():
        assert torch.equal(weights[name], tensor)


def test_a_moving_average_is_read_with_the_weights_of_what_never_moved(run_dir):
    save(run_dir, 3, parts=("weight", "exp_avg", "ema"))
    save(run_dir, 4)
    engine = MemoryEngine(3, parts=("weight", "exp_avg", "ema"))
    path = run_dir.checkpoints / "step_00000003"
    whole = {f"{part}/{n}": t.view(-1) for part in engine.tensors for n, t in engine.tensors[part].items()}
    whole.pop("ema/norm.gain")
    rewrite(path / "state.json", state_files=1)
    write_state_file(path / file_name(0), whole, dict.fromkeys(whole, 0))
    averages = Weights(path, "ema")
    assert torch.equal(averages["embedding"], engine.tensors["ema"]["embedding"])
    assert torch.equal(averages["norm.gain"], engine.tensors["weight"]["norm.gain"])
    with pytest.raises(CheckpointError, match=r"step_00000004: has no moving average.*training\.ema_decay"):
        Weights(run_dir.checkpoints / "step_00000004", "ema")


@st.composite
def tilings(draw):
    """Shapes, and for each tensor where it is cut and which of the files holds each piece."""
    num_files = draw(st.integers(1, 5))
    shapes = draw(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 6), max_size=3), min_size=1))
    pieces = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        count = draw(st.integers(1, num_files))  # a file holds one piece of a tensor
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
        files = draw(st.permutations(range(num_files)))[:count]
        pieces[name] = list(zip([0, *cuts], [*cuts, size], files, strict=True))
    return num_files, shapes, pieces


def write_tiling(folder, num_files, shapes, pieces, tensors):
    write_json(folder / "state.json", {"version": 2, "state_files": num_files, "shapes": shapes})
    for file in range(num_files):
        mine = {f"weight/{n}": (a, b) for n, cut in pieces.items() for a, b, f in cut if f == file}
        values = {key: tensors[key.partition("/")[2]].view(-1)[a:b] for key, (a, b) in mine.items()}
        write_state_file(folder / file_name(file), values, {key: a for key, (a, _) in mine.items()})


@given(tilings(), st.data())
@settings(max_examples=60)
def test_any_range_of_any_tiling_over_files_is_what_was_written(tiling, data):
    num_files, shapes, pieces = tiling
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as name:
        write_tiling(Path(name), num_files, shapes, pieces, tensors)
        files = StateFiles(Path(name))
        for key, tensor in tensors.items():
            start = data.draw(st.integers(0, tensor.numel()))
            stop = data.draw(st.integers(start, tensor.numel()))
            assert torch.equal(files.read("weight", key, start, stop), tensor.view(-1)[start:stop])
            assert files.read("exp_avg", key, start, stop) is None


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ([(0, 2, 0), (3, 6, 1)], "of the 6 elements of weight/a, 2 to 3 are missing"),
        ([(1, 6, 0)], "0 to 1 are missing"),
        ([(0, 5, 0)], "5 to 6 are missing"),
        ([(0, 4, 0), (3, 6, 1)], "3 to 4 are there twice"),
        ([(0, 6, 0), (0, 6, 1)], "0 to 6 are there twice"),
        ([], "has no weight of a"),
    ],
)
def test_fragments_with_gaps_or_overlaps_are_refused_at_opening(tmp_path, cuts, says):
    write_tiling(tmp_path, 2, {"a": [2, 3]}, {"a": cuts}, {"a": torch.randn(2, 3)})
    with pytest.raises(CheckpointError, match=says):
        StateFiles(tmp_path)


@pytest.mark.parametrize("version", [1, 3, None])
def test_another_version_of_the_format_says_which_and_what_to_do(tmp_path, version):
    write_json(tmp_path / "state.json", {"version": version, "state_files": 0, "shapes": {}})
    with pytest.raises(CheckpointError, match=rf"format version {version}, this program reads version 2\. Resume with"):
        StateFiles(tmp_path)


def a_run(run_dir, losses):
    """Checkpoints with these validation losses by step; None: not validated."""
    for step, loss in losses.items():
        save(run_dir, step, num_ranks=1, validation=None if loss is None else {"loss": loss})


def kept(run_dir, patience_steps=1000, metric="loss", new=None, **values):
    settings, newest = CheckpointConfig(**{"every_steps": 2, "keep_last": 1, **values}), checkpoints.saved(run_dir)[-1]
    with patch.object(retention, "PATIENCE_STEPS", patience_steps):
        path = run_dir.checkpoints / folder_name(new) if new else newest
        list(retention.retain(run_dir, settings, metric, path))
    return names(checkpoints.saved(run_dir))


LOSSES = {2: 3.0, 3: 0.5, 4: 1.0, 6: 2.0, 8: float("nan"), 10: 4.0, 12: None}


def test_the_newest_and_the_last_regular_ones_are_kept_and_those_of_stops_are_not(run_dir):
    a_run(run_dir, dict.fromkeys((2, 4, 5, 6, 7)))
    assert kept(run_dir, keep_last=3) == [4, 6, 7]  # a stop was at 5, and just now at 7
    save(run_dir, 8)
    assert kept(run_dir, keep_last=3) == [4, 6, 8]
    assert not list(run_dir.checkpoints.glob("*.trash"))


def test_one_that_a_divergence_noticed_now_would_leave_is_kept(run_dir):
    a_run(run_dir, dict.fromkeys((2, 4, 6, 8, 10, 12)))
    assert kept(run_dir, patience_steps=2, keep_last=2) == [6, 10, 12]
    assert kept(run_dir, patience_steps=100) == [12]


def test_the_best_are_kept_besides_and_a_loss_that_is_no_number_is_never_best(run_dir):
    a_run(run_dir, LOSSES)
    assert names(retention.best(checkpoints.saved(run_dir), 2, "loss")) == [3, 4]
    assert names(retention.best(checkpoints.saved(run_dir), 99, "loss")) == [2, 3, 4, 6, 10]
    assert kept(run_dir, keep_best=2) == [4, 6, 12]  # 3 was a stop


def test_the_best_are_those_of_the_highest_value_where_higher_is_better(run_dir):
    for step, loss in LOSSES.items():
        save(run_dir, step, num_ranks=1, validation=None if loss is None else {"loss": 0.0, "news/chrf": loss})
    assert names(retention.best(checkpoints.saved(run_dir), 2, "news/chrf")) == [2, 10]
    assert names(retention.best(checkpoints.saved(run_dir), 2, "chrf")) == []
    assert kept(run_dir, metric="news/chrf", keep_best=2) == [2, 10, 12]


def with_settings(smoothing, beam=1):
    return {
        "training": {"label_smoothing": smoothing}, "data": {"target_language": "de"},
        "validation": {"beam_size": beam}, "decoding": {},
    }  # fmt: skip


def test_only_checkpoints_that_were_measured_as_the_newest_one_are_compared(run_dir):
    for step, loss, kind in (
        (1, 1.0, None),
        (2, 2.0, with_settings(0.0)),
        (4, 3.0, with_settings(0.1)),
        (6, 4.0, with_settings(0.1, 4)),
    ):
        more = {} if kind is None else {"settings": kind}  # None: an older version wrote it
        save(run_dir, step, num_ranks=1, validation={"loss": loss, "nll": loss, "bleu": loss}, **more)
    saved = checkpoints.saved(run_dir)
    assert names(retention.best(saved, 9, "loss")) == [1, 4, 6]
    assert names(retention.best(saved, 9, "nll")) == [1, 2, 4, 6]
    assert names(retention.best(saved, 9, "bleu")) == [1, 6]
    assert kept(run_dir, keep_best=1) == [4, 6]


def test_measures_that_a_later_start_made_are_compared_as_made_with_its_settings(run_dir):
    for step, value in ((2, 5.0), (4, None), (6, None)):
        save(run_dir, step, validation=None if value is None else {"bleu": value}, settings=with_settings(0.1, beam=1))
    first, second, third = checkpoints.saved(run_dir)
    write_json(third / ".validation.json", {"bleu": 3.0})  # of an older version
    assert names(retention.best([first, third], 9, "bleu")) == [2, 6]
    add_validation(second, {"bleu": 4.0}, with_settings(0.1, beam=4))
    add_validation(second, {"bleu": 9.0}, with_settings(0.1, beam=1))  # as a start does that was killed after it
    assert validation_of(second) == ({"bleu": 4.0}, with_settings(0.1, beam=4))
    assert names(retention.best([first, second], 9, "bleu")) == [4]
    assert names(retention.best([first, second, third], 9, "bleu")) == [2, 6]


def test_a_checkpoint_is_read_once_until_it_is_validated_later_or_its_step_is_saved_again(run_dir, monkeypatch):
    """A run that keeps thousands would read all of them at each save, while all ranks wait."""
    read = []
    monkeypatch.setattr(retention, "validation_of", lambda path: read.append(step_of(path)) or validation_of(path))
    for step, loss in ((2, 1.0), (4, 2.0), (6, None), (8, 3.0)):
        a_run(run_dir, {step: loss})
        os.utime(run_dir.checkpoints / folder_name(step), (0, 0))  # so that a later time is another
        assert kept(run_dir, keep_last=9, keep_best=1) == list(range(2, step + 1, 2))
    assert read == [2, 4, 6, 8]
    add_validation(run_dir.checkpoints / folder_name(6), {"loss": 0.5}, with_settings(0.1))
    assert names(retention.best(checkpoints.saved(run_dir), 1, "loss")) == [6]
    checkpoints.set_aside_from(run_dir, 6)
    a_run(run_dir, {6: 5.0, 8: 0.25})
    assert names(retention.best(checkpoints.saved(run_dir), 2, "loss")) == [2, 8]
    assert read == [2, 4, 6, 8, 6, 6, 8]


def test_a_checkpoint_that_goes_while_they_are_compared_is_left_out_and_a_bad_moment_of_its_disk_is_not_kept(
    run_dir, monkeypatch
):
    a_run(run_dir, {2: 1.0, 4: 2.0, 6: 3.0})
    saved = checkpoints.saved(run_dir)
    shutil.rmtree(saved[0])
    with monkeypatch.context() as patch:
        patch.setattr(retention, "validation_of", lambda path: _raise(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):  # not that another one is the best
            retention.best(saved, 1, "loss")
    assert names(retention.best(saved, 1, "loss")) == [4]


def _raise(error):
    raise error


def test_of_equal_losses_the_first_is_the_best(run_dir):
    a_run(run_dir, {2: 1.0, 4: 1.0, 6: None})
    assert names(retention.best(checkpoints.saved(run_dir), 1, "loss")) == [2]


def test_those_of_every_so_many_steps_are_kept_for_good(run_dir):
    a_run(run_dir, LOSSES)
    assert kept(run_dir, keep_every_steps=4) == [4, 8, 12]


def of_intervals(every_steps, keep_every_steps=None):
    intervals = {"every_steps": every_steps, "keep_every_steps": keep_every_steps}
    return {**with_settings(0.1), "checkpoints": intervals}


def test_checkpoints_of_another_interval_stay_the_regular_the_best_and_the_permanent_ones_that_they_were(run_dir):
    for step in (10, 20, 25, 30, 40, 50, 60):
        save(run_dir, step, 1, validation={"loss": abs(step - 20.0)}, settings=of_intervals(10, 30))
    save(run_dir, 65, 1, validation={"loss": 65.0}, settings=of_intervals(13, 130))
    assert names(retention.regular(checkpoints.saved(run_dir), 13)) == [10, 20, 30, 40, 50, 60, 65]  # 25 was a stop
    assert kept(run_dir, every_steps=13, keep_last=3, keep_best=2, keep_every_steps=130) == [10, 20, 30, 50, 60, 65]
    assert kept(run_dir, every_steps=13, keep_last=1, keep_every_steps=50) == [30, 60, 65]


def test_the_best_of_another_measurement_stay_until_there_are_as_many_of_the_new_one(run_dir):
    for step, value in ((2, 9.0), (4, 5.0), (6, 8.0)):
        save(run_dir, step, 1, validation={"bleu": value}, settings=with_settings(0.1))
    for step, expected in ((8, [2, 6, 8]), (10, [8, 10])):
        save(run_dir, step, 1, validation={"bleu": 1.0}, settings=with_settings(0.1, beam=4))
        assert kept(run_dir, metric="bleu", keep_best=2) == expected
    assert names(retention.best(checkpoints.saved(run_dir), 2, "bleu")) == [8, 10]


def test_the_best_of_another_signature_are_compared_as_measured_otherwise_and_those_without_one_as_the_newest(run_dir):
    for step, value, words in ((2, 90.0, "char"), (4, 80.0, "char"), (6, 70.0, None), (8, 2.0, "ja-mecab-0.996")):
        signature = {} if words is None else {"bleu_signature": f"nrefs:1|tok:{words}|version:2.{step}.0"}
        save(run_dir, step, 1, validation={"bleu": value, **signature}, settings=with_settings(0.1))
    saved = checkpoints.saved(run_dir)
    assert names(retention.best(saved, 9, "bleu")) == [6, 8]
    assert names(retention.best(saved[:3], 9, "bleu")) == [2, 4, 6]
    assert kept(run_dir, metric="bleu", keep_best=2) == [6, 8]


def test_checkpoints_of_another_run_are_neither_counted_nor_deleted_until_a_save_takes_their_place(run_dir):
    """As a person copies them there; the next start sets them aside."""
    for step in (2, 3, 10, 12):
        save(run_dir, step, 1, validation={"loss": 0.5}, run_id="another")
    for step, expected in ((4, [2, 3, 4, 10, 12]), (6, [2, 3, 4, 6, 10, 12]), (8, [2, 3, 4, 6, 8, 10, 12])):
        a_run(run_dir, {step: step / 10})
        assert kept(run_dir, new=step, keep_last=2, keep_best=1) == expected
    a_run(run_dir, {10: 1.0, 12: 2.0})  # those of the other run are set aside
    assert kept(run_dir, new=12, keep_last=1, keep_best=1) == [2, 3, 4, 12]


def test_what_was_set_aside_counts_for_nothing_and_stays(run_dir):
    a_run(run_dir, dict.fromkeys((2, 4, 6, 8)))
    checkpoints.set_aside(run_dir.checkpoints / "step_00000004", "damaged")
    checkpoints.set_aside_from(run_dir, 8)
    assert kept(run_dir, keep_last=2) == [2, 6]
    aside = sorted(path.name for path in run_dir.checkpoints.glob("step_*.*"))
    assert aside == ["step_00000004.damaged", "step_00000008.diverged"]


def test_the_run_of_the_newest_checkpoint_is_known(run_dir):
    assert checkpoints.newest_run_id(run_dir) is None
    save(run_dir, 1, run_id="first")
    save(run_dir, 2)
    assert checkpoints.newest_run_id(run_dir) == RUN_ID
    (run_dir.checkpoints / "step_00000002" / "state.json").write_bytes(b"{")
    assert checkpoints.newest_run_id(run_dir) == "first"
