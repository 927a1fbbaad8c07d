"""Which checkpoints, and which part of them, become a model folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_helpers import SHAPES, MemoryEngine, save
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.schema import CheckpointConfig, ModelConfig, ValidationConfig
from dist_transformer.errors import CheckpointError
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import final_model
from dist_transformer.training.checkpoint.final_model import Averaged, write_final_model

PARTS = ("weight", "ema")
LOSSES = {2: 1.0, 4: 3.0, 5: 0.1, 6: 2.0, 8: 4.0}


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    for step, loss in LOSSES.items():
        save(run_dir, step, parts=PARTS, validation={"loss": loss, "news/bleu": 10 * loss})
    return run_dir


@pytest.fixture
def averaged(run_dir, monkeypatch):
    """Calls it with these settings of `checkpoints`; what it says of the model, and the weights that it would write."""
    written = []
    monkeypatch.setattr(final_model, "save_model_folder", lambda folder, weights, *others: written.append(weights))
    tokenizer = SimpleNamespace(source="tokenizer.model", target="tokenizer.model")
    manifest = SimpleNamespace(
        tokenizer=tokenizer, source_vocabulary=9, target_vocabulary=9, pad_id=0, bos_id=1, eos_id=2,
        source_language="en", target_language="de", splits={}, training=(),
    )  # fmt: skip

    def call(choice=None, metric="loss", **settings):
        kept = CheckpointConfig(**{"every_steps": 2, **settings})
        config = SimpleNamespace(checkpoints=kept, validation=ValidationConfig(metric=metric), model=ModelConfig())
        made_of = write_final_model(config, run_dir, Path(), manifest, Path(), choice)
        return made_of, written[-1]

    return call


def average_of(*steps, what="average"):
    return f"{what} of {', '.join(f'step_{step:08d}' for step in steps)}"


def mean_of(part, *steps):
    engines = [MemoryEngine(step, parts=PARTS) for step in steps]
    return {name: torch.stack([e.tensors[part][name].double() for e in engines]).mean(0).float() for name in SHAPES}


@pytest.mark.parametrize(
    ("settings", "part", "steps"),
    [
        ({"average_last": 2}, "weight", [6, 8]),
        ({"average_last": 4}, "weight", [2, 4, 6, 8]),  # 5 was a stop
        ({"final_model": "average_best", "keep_best": 2}, "weight", [2, 6]),
        ({"final_model": "average_best", "keep_best": 9}, "weight", [2, 4, 6, 8]),
        ({"final_model": "ema"}, "ema", [8]),
    ],
)
def test_the_configuration_says_what_the_final_model_is(averaged, settings, part, steps):
    made_of, weights = averaged(**settings)
    assert made_of == average_of(*steps, what="moving average" if part == "ema" else "average")
    assert weights.keys() == SHAPES.keys()
    for name, mean in mean_of(part, *steps).items():
        torch.testing.assert_close(weights[name], mean)


def test_a_choice_goes_before_the_configuration(averaged):
    assert averaged(Averaged("average_last", 1), final_model="ema")[0] == average_of(8)
    assert averaged(Averaged("average_best", 1))[0] == average_of(2)


def test_checkpoints_are_chosen_by_their_steps_also_that_of_a_stop(averaged):
    made_of, weights = averaged(Averaged("steps", 2, (5, 2)))
    assert made_of == average_of(2, 5)
    for name, mean in mean_of("weight", 2, 5).items():
        torch.testing.assert_close(weights[name], mean)
    with pytest.raises(CheckpointError, match=r"checkpoints: no step 7, expected one of \[2, 4, 5, 6, 8\]"):
        averaged(Averaged("steps", 2, (2, 7)))


def test_the_best_are_so_by_the_metric_of_validation(averaged):
    best = {"final_model": "average_best", "keep_best": 2}
    assert averaged(**best, metric="news/bleu")[0] == average_of(4, 8)
    with pytest.raises(CheckpointError, match="no checkpoint knows its validation chrf, so none is the best"):
        averaged(Averaged("average_best", 2), metric="chrf")


@pytest.mark.parametrize(
    ("kind", "said"), [("average_last", "(complete)"), ("average_best", "(complete and with a validation loss)")]
)
def test_fewer_than_asked_for_are_taken_with_a_warning_but_not_where_only_the_configuration_asks(
    averaged, caplog, kind, said
):
    assert averaged(Averaged(kind, 4))[0] == averaged(final_model=kind, keep_best=9, average_last=9)[0]
    assert not caplog.messages
    assert averaged(Averaged(kind, 5))[0] == average_of(2, 4, 6, 8)
    assert caplog.messages == [f"5 checkpoints asked for, 4 there {said}"]


@pytest.mark.parametrize("final_model", ["average_last", "average_best", "ema"])
def test_damaged_checkpoints_are_left_out_and_named(averaged, run_dir, caplog, final_model):
    path = run_dir.checkpoints / "step_00000008" / "state_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    made_of, _ = averaged(final_model=final_model, average_last=2, keep_best=4)
    steps = {"average_last": [6], "average_best": [2, 4, 6], "ema": [6]}[final_model]
    assert made_of.partition("average ")[2] == average_of(*steps).removeprefix("average ")
    assert "step_00000008 is damaged (state_0.safetensors has" in caplog.text


def test_another_runs_checkpoint_is_left_out_and_named(averaged, run_dir, caplog):
    save(run_dir, 6, parts=PARTS, run_id="another")
    assert averaged(average_last=2)[0] == average_of(8)
    assert "belongs to another run, another" in caplog.text


def test_the_best_of_checkpoints_without_a_validation_are_refused(averaged, run_dir):
    for path in run_dir.checkpoints.glob("step_*"):
        path.rename(path.with_name(path.name + ".diverged"))
    save(run_dir, 2)
    with pytest.raises(
        CheckpointError, match=r"none is the best; train with data\.validation and checkpoints\.keep_best"
    ):
        averaged(Averaged("average_best", 2))


def test_where_no_validation_succeeded_the_model_of_a_run_is_made_of_the_last_ones(averaged, caplog):
    best = {"final_model": "average_best", "keep_best": 2}
    assert averaged(metric="plugin", average_last=3, **best)[0] == average_of(4, 6, 8)
    assert "no checkpoint knows its validation plugin, so none is the best: the last ones are averaged" in caplog.text


def test_a_moving_average_that_was_never_kept_is_refused(averaged, run_dir):
    save(run_dir, 10)
    with pytest.raises(CheckpointError, match=r"step_00000010: has no moving average.*without training\.ema_decay"):
        averaged(Averaged("ema"))


@pytest.mark.parametrize(
    "choice", [*(Averaged(kind, 2) for kind in ("average_last", "average_best", "ema")), Averaged("steps", 1, (2,))]
)
def test_without_checkpoints_there_is_no_model(averaged, run_dir, choice):
    run_dir.checkpoints.rename(run_dir.checkpoints.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match="there is no complete checkpoint to make a model of; train first"):
        averaged(choice)


def test_options_that_exclude_each_other_are_refused(run_dir):
    result = CliRunner().invoke(app, ["average", str(run_dir.path), "--last", "2", "--ema"])
    assert "--last and --ema exclude each other: give one of --last, --best, --ema and --step" in str(result.exception)
