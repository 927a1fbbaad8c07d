"""A run that goes on with other settings says which, keeps the former, and compares no two kinds of one measure."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from running import records, with_constants

from dist_transformer.config.former_keys import CONSTANTS
from dist_transformer.config.loading import load_config
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir

pytestmark = pytest.mark.slow

BOTH = ("checkpoints.every_steps=1", "schedule.warmup_steps=2")
ENOUGH = ("training.max_steps=3", *BOTH)
LATER = ("training.max_steps=6", *BOTH)
PATIENT = with_constants({"tracking.tracker.CLOSE_SECONDS": 120})
TRACKED = "tracking={enabled: true}"


def state_of(run: Path, step: int) -> dict:
    return read_json(run / "checkpoints" / f"step_{step:08d}" / "state.json")


def test_each_changed_setting_is_said_in_log_history_and_mlflow_and_the_former_configuration_is_kept(train_small):
    run = train_small("told", *ENOUGH, TRACKED, **PATIENT)
    before = load_config(run / "config.yaml", check_files=False)
    assert not (run / "history.jsonl").read_text().count('"changed"')
    train_small("told", *LATER, TRACKED, "optimizer.learning_rate=0.005", "slurm.environment={MODE: /key}", **PATIENT)
    texts = ["optimizer.learning_rate: 0.01 -> 0.005", "training.max_steps: 3 -> 6"]
    said = [line for line in (run / "train.log").read_text().splitlines() if "changed since step 3: " in line]
    assert [line.partition("changed since step 3: ")[2] for line in said] == texts
    [changed] = records(run, "changed", "history.jsonl")
    assert changed["step"] == 3
    assert changed["settings"] == {"optimizer.learning_rate": [0.01, 0.005], "training.max_steps": [3, 6]}
    tracked = read_json(run / "tracking.json")
    tags = MlflowClient(tracking_uri=tracked["uri"]).get_run(tracked["run_id"]).data.tags
    assert tags["changed_since_step_3"] == "; ".join(texts)
    assert load_config(run / "config.until_step_00000003.yaml", check_files=False) == before
    train_small("told", *BOTH, TRACKED, "training.max_steps=8", "optimizer.learning_rate=0.005", **PATIENT)
    assert len(records(run, "changed", "history.jsonl")) == 2
    assert (run / "config.until_step_00000006.yaml").is_file()
    assert "/key" not in json.dumps(state_of(run, 6))


def test_a_resume_that_changes_nothing_says_and_keeps_nothing(train_small):
    run = train_small("unchanged", *ENOUGH, "training.max_hours=0.000001", code=75)
    RunDir(run).config.write_text("{", encoding="utf-8")  # what it was is in the checkpoint
    train_small("unchanged", *ENOUGH, "training.max_hours=0.000001", code=75)
    assert records(run, "changed", "history.jsonl") == []
    assert "are lost" not in (run / "train.log").read_text()
    assert not list(run.glob("config.until_*"))


@pytest.fixture(scope="module")
def three_steps(train_small: Callable[..., Path]) -> Path:
    return train_small("three-steps", *ENOUGH)


def _copy_of(run: Path, name: str) -> tuple[Path, Path]:
    """A copy of the run to be made an older one, and its checkpoint of step 3, of which `_write_state` is to follow."""
    copy = shutil.copytree(run, run.with_name(name))
    step_3 = copy / "checkpoints" / "step_00000003"
    for file in (copy / "config.yaml", step_3 / "state.json"):
        file.write_text(file.read_text(encoding="utf-8").replace(run.name, name), encoding="utf-8")
    return copy, step_3


def test_a_checkpoint_that_does_not_hold_its_settings_is_compared_with_the_configuration_of_its_folder(
    train_small, three_steps
):
    run, step_3 = _copy_of(three_steps, "older")
    state = read_json(step_3 / "state.json")
    del state["settings"]
    _write_state(step_3, state)
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines(keepends=True)[0])
    train_small("older", *LATER)
    said = f"records    {run}/metrics.jsonl: those after step 1 are lost"
    assert said in (run / "train.log").read_text()
    [changed] = records(run, "changed", "history.jsonl")
    assert changed["settings"] == {"training.max_steps": [3, 6]}


def test_a_run_of_a_version_with_more_settings_goes_on_and_says_nothing_of_them(train_small, command, three_steps):
    run, step_3 = _copy_of(three_steps, "of-before")
    state = read_json(step_3 / "state.json")
    state["settings"] = _as_before(state["settings"])
    _write_state(step_3, state)
    config = _as_before(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command("train", run, "training.max_steps=4")
    train_small("of-before", *LATER)
    changed = [record["settings"] for record in records(run, "changed", "history.jsonl")]
    assert changed == [{"training.max_steps": [3, 4]}, {"training.max_steps": [4, 6]}]


def test_a_checkpoint_from_before_these_options_of_the_model_is_gone_on_with(train_small, three_steps):
    run, step_3 = _copy_of(three_steps, "paper")
    state = read_json(step_3 / "state.json")
    for name in ("norm_type", "final_norm", "activation", "positions", "output_bias"):
        del state["recipe"][f"model.{name}"]
    state["recipe"]["model.attention_gain"] = 1.0  # one day's checkpoints named it
    _write_state(step_3, state)
    train_small("paper", *LATER, "model.attention_gain=0.7071")
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]


def _as_before(settings: dict) -> dict:
    """All keys that the settings of a run had when there were more of them."""
    for section, constants in CONSTANTS.items():
        settings[section] |= constants
    del settings["slurm"]["sbatch"], settings["slurm"]["srun"]
    return settings


def _write_state(folder: Path, state: dict) -> None:
    from dist_transformer.training.checkpoint.checkpoints import file_entry

    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    manifest = read_json(folder / "manifest.json")
    manifest["files"]["state.json"] = file_entry(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_losses_of_another_label_smoothing_are_not_compared_with_those_before(train_small):
    """Those of the higher smoothing are higher: patience would end the run, and the best would stay the former ones."""
    validated = (
        "validation.every_steps=1",
        "validation.patience=2",
        "checkpoints.keep_best=1",
        "checkpoints.keep_last=2",
    )
    run = train_small("smoothed", *ENOUGH, *validated, "training.label_smoothing=0.0", ranks=2)
    lowest = state_of(run, 3)["early_stopping"]["best"]
    train_small("smoothed", *LATER, *validated, "training.label_smoothing=0.6", ranks=2)
    found = [record["loss"] for record in records(run, "validation")]
    assert min(found[3:]) > lowest
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
    assert state_of(run, 6)["early_stopping"]["best_step"] > 3
    assert state_of(run, 6)["loss_monitor"]["count"] <= 3
    assert "the best and the patience begin anew" in (run / "train.log").read_text()
    assert read_json(run / "run.json")["state"] == "finished"
    kept = sorted(path.name for path in (run / "checkpoints").glob("step_????????"))
    assert kept[0] > "step_00000003"


def test_a_run_that_ends_early_after_scores_have_another_signature_says_why(train_small):
    settings = (
        *("validation={every_steps: 1, translate: true, metric: chrf, patience: 2}", "checkpoints.every_steps=1"),
        *("optimizer.learning_rate=1.0e-20", "schedule.warmup_steps=1"),  # so that no score is better
    )
    run = train_small("signed", "training.max_steps=1", *settings)
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"chrf_signature": "nrefs:1|' in text
    text = text.replace('"chrf_signature": "nrefs:1|', '"chrf_signature": "nrefs:2|')
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    train_small("signed", "training.max_steps=6", *settings)
    said = (run / "train.log").read_text(encoding="utf-8")
    assert "best and patience begin anew" in said
    assert re.search(r"early stop no better chrf than \S+ of step 2 in 2 validations", said)
    assert records(run)[-1]["step"] == 4
