"""What people do with a trained model: translate, evaluate, average, and see the run in MLflow."""

import json

import pytest
from mlflow import MlflowClient
from running import records

from dist_transformer.interop.model_folder import load_model_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(train_small, command):
    """Tracked in the default store, stopped by its step limit and gone on with once."""
    train_small("tracked", "tracking.enabled=true", "validation.every_steps=3")
    return train_small("tracked", "tracking.enabled=true", "validation.every_steps=3", "training.max_steps=9")


def test_translate_keeps_order_and_leaves_empty_lines_empty(command, trained):
    text = "twenty-one\n\n  \nIt is nine o'clock.\n" + "twenty-one " * 60 + "\ntwenty-one\n"
    lines = command("translate", trained, text=text).split("\n")[:-1]
    assert len(lines) == 6
    assert lines[1] == lines[2] == ""
    assert lines[0] == lines[5] == command("translate", trained / "model", text="twenty-one\n").rstrip("\n")


def test_evaluate_prints_and_keeps_scores_with_their_signatures(command, trained, small_corpus):
    said = command("evaluate", trained)
    kept = json.loads((trained / "evaluation" / "test.json").read_text(encoding="utf-8"))
    assert f"BLEU  {kept['bleu']:.2f}  {kept['bleu_signature']}" in said
    assert "tok:13a" in kept["bleu_signature"]
    assert kept["pairs"] == 40
    files = ("--source", small_corpus / "valid.en", "--target", small_corpus / "valid.de")
    assert f"BLEU  {kept['bleu']:.2f}" in command("evaluate", trained / "model", *files)


def test_evaluate_without_a_corpus_says_what_to_give(command, trained):
    assert "nothing to score; give --source and --target" in command("evaluate", trained / "model", code=2)


def test_average_writes_a_model_folder_of_the_last_checkpoints(command, trained, tmp_path):
    assert "step_00000009" in command("average", trained, "--last", 1, "--output", tmp_path / "one")
    assert load_model_folder(tmp_path / "one").information.step == 9


def test_two_starts_are_one_run_in_mlflow_with_every_step_once(trained, command):
    client = MlflowClient(f"sqlite:///{command.folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dist-transformer")
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == 1
    run = found[0]
    assert run.info.status == "FINISHED"
    assert run.data.params["model.d_model"] == "32"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(r["step"], r["loss"]) for r in records(trained)]
    validation = client.get_metric_history(run.info.run_id, "validation/loss")
    assert [m.step for m in validation] == [3, 6, 9]


def test_the_log_says_at_start_what_will_happen(trained):
    log = (trained / "train.log").read_text(encoding="utf-8")
    for words in ("parameters: 1 + 1 layers", "600 pairs", "4 lanes of 512 tokens", "ZeRO stage 0, 1 ranks", "memory "):
        assert words in log
    assert "start      step 0" in log
    assert "start      step 6, resumed from" in log


def test_run_json_says_how_the_run_stands(trained):
    state = json.loads((trained / "run.json").read_text(encoding="utf-8"))
    assert (state["state"], state["step"], state["starts"]) == ("finished", 9, 2)
