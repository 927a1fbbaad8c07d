"""A run that is stopped by its time limit, gone on with, and ends with each kind of final model."""

import pytest
import torch
from safetensors.torch import load_file

from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import STATE, Weights

pytestmark = pytest.mark.slow

SETTINGS = (
    "checkpoints={every_steps: 2, keep_last: 1, average_last: 1, keep_best: 2}",
    "validation.every_steps=2",
    "training.ema_decay=0.9",
)
SPOILING = ("training.max_steps=8", "optimizer.learning_rate=1.0")
"""The last steps make the weights worse, so that the last checkpoint is none of the best."""


def test_a_run_stopped_by_its_time_limit_ends_with_the_moving_average_and_then_with_the_mean_of_its_best(
    command, train_small
):
    run = train_small("final", *SETTINGS, "checkpoints.final_model=ema", "training.max_hours=0.0001", code=75)
    assert "time limit of training.max_hours" in (run / "train.log").read_text(encoding="utf-8")
    assert read_json(run / "run.json")["state"] == "stopped"
    assert not (run / "model").exists()

    train_small("final", *SETTINGS, "checkpoints.final_model=ema")
    newest = checkpoints.saved(RunDir(run))[-1]
    assert newest.name == "step_00000006"
    assert_is_model(run, dict(Weights(newest, "ema")))
    assert len(command("translate", run, text="twenty-one\nseven\n").splitlines()) == 2

    command("train", run, *SPOILING, "checkpoints.final_model=average_best")
    losses = {path: read_json(path / STATE)["validation"]["loss"] for path in checkpoints.saved(RunDir(run))}
    best = sorted(losses, key=lambda path: losses[path])[:2]
    assert [path.name for path in losses] == ["step_00000004", "step_00000006", "step_00000008"]
    assert "step_00000008" not in {path.name for path in best}
    means = {name: (weight + Weights(best[1])[name]) / 2 for name, weight in Weights(best[0]).items()}
    assert_is_model(run, means)

    said = command("average", run, "--best", 5, "--output", run / "best")
    assert "5 checkpoints asked for, 3 there" in said
    assert f"{run / 'best'}: average of step_00000004, step_00000006, step_00000008" in said


def assert_is_model(run, weights):
    model = load_file(run / "model" / "model.safetensors")
    assert model.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(model[name], weight, rtol=1e-6, atol=1e-7)
