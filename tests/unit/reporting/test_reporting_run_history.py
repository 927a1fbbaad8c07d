"""A run folder is read whatever state it is in."""

import json
import shutil

import pytest
from run_builder import SECONDS_PER_STEP, append, time_of, train_record, write_prepared, write_run

from dist_transformer.config.model_size import count_by_part
from dist_transformer.config.schema import ModelConfig
from dist_transformer.files import write_json, write_text
from dist_transformer.reporting.page import run_page
from dist_transformer.reporting.run_history import read_story, starts_of
from dist_transformer.run.folder import RunDir


def test_the_story_of_a_finished_run(tmp_path):
    write_prepared(tmp_path / "prepared")
    story = read_story(write_run(tmp_path / "run", num_steps=400, restarts=(150, 250)))
    assert story.best is not None
    assert (story.best.measure, story.best.step) == ("bleu", 300)  # of 40 r (1.6 - r) at r = k / 8: r = 6 / 8
    assert story.best.value == pytest.approx(40 * 0.75 * 0.85)
    assert story.restart_steps == [150, 250]
    assert story.trained_seconds == pytest.approx(400 * SECONDS_PER_STEP)
    assert [checkpoint.step for checkpoint in story.checkpoints] == [300, 350, 400]
    assert story.checkpoints[-1].measures["bleu"] == pytest.approx(24.0)
    assert story.evaluations["test"]["bleu"] == 31.25
    assert story.prepared is not None
    assert story.prepared.digest == "feed" * 16
    assert story.num_parameters == count_by_part(ModelConfig(preset="tiny"), 304, 304).total


def test_values_from_before_the_metric_was_measured_otherwise_are_never_the_best(tmp_path):
    run_dir = write_run(tmp_path / "run")
    append(
        run_dir.history, [{"event": "changed", "step": 300, "time": 0.0, "settings": {}, "metric_begins_anew": True}]
    )
    assert read_story(run_dir).best.step == 350


def test_a_change_whose_step_is_missing_is_no_error(tmp_path):
    run_dir = write_run(tmp_path / "run")
    changed = {"event": "changed", "time": 0.0, "metric_begins_anew": True}
    append(run_dir.history, [{**changed, "settings": {"validation.beam_size": [1, 4]}}, {**changed, "settings": None}])
    assert read_story(run_dir).best.step == 300


@pytest.mark.parametrize(
    ("setting", "best"),
    [
        ("validation.beam_size", {"bleu": 350, "newstest/chrf": 400, "loss": 400, "newstest/bleu": 350}),
        ("data.more_validation.newstest.source", {"bleu": 300, "newstest/bleu": 350, "newstest/token_accuracy": 400}),
        ("optimizer.beta1", {"bleu": 300, "newstest/bleu": 300}),
    ],
)
def test_each_measure_has_its_best_since_it_is_measured_as_now(tmp_path, setting, best):
    run_dir = write_run(tmp_path / "run")
    append(run_dir.history, [{"event": "changed", "step": 300, "time": 0.0, "settings": {setting: [1, 2]}}])
    story = read_story(run_dir)
    assert {measure: story.best_of(measure)[0] for measure in best} == best


def test_the_loss_tells_the_best_where_the_metric_was_never_measured(tmp_path):
    run_dir = write_run(tmp_path / "run")
    write_text(run_dir.config, run_dir.config.read_text().replace("metric: bleu", "metric: elsewhere/comet"))
    story = read_story(run_dir)
    assert story.best is not None
    assert (story.best.measure, story.best.step) == ("loss", 400)


def test_a_killed_start_lasted_until_its_last_record(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=100, every=5, restarts=())
    run_dir.history.unlink()
    begun = {"num_ranks": 1, "nodes": ["n1"], "device": "cpu"}
    append(
        run_dir.history,
        [
            {"event": "start", "step": 0, "time": time_of(0), **begun},
            {"event": "start", "step": 30, "time": time_of(60) + 1, **begun},
            {"event": "end", "step": 100, "time": time_of(100), "state": "finished", "reason": ""},
        ],
    )
    story = read_story(run_dir)
    assert [bool(start.ended) for start in story.starts] == [False, True]
    assert story.trained_seconds == pytest.approx((60 + 100 - 60) * SECONDS_PER_STEP - 1)


def test_an_end_without_a_start_belongs_to_nothing():
    assert starts_of([{"event": "end", "step": 3}]) == []


def test_restarts_are_those_of_the_attempts_where_there_is_no_history(tmp_path):
    run_dir = write_run(tmp_path / "run")
    run_dir.history.unlink()
    write_json(run_dir.job, {"job_id": "7", "submitted_at": "2026-01-01T00:00:00"})
    began = {"event": "began", "time": 1.0, "job": "7", "nodes": "n1", "ranks": 2}
    append(
        run_dir.attempts,
        [{**began, "attempt": 0, "newest": None}, {**began, "attempt": 1, "newest": "step_00000150"}],
    )
    assert read_story(run_dir).restart_steps == [150]


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    ["metrics.jsonl", "samples.jsonl", "history.jsonl", "config.yaml", "run.json", "evaluation", "checkpoints"],
)
def test_a_page_is_written_without_any_one_file(tmp_path, missing):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    path = run_dir.path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "</html>" in run_page(read_story(run_dir))


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "history.jsonl"])
def test_a_torn_last_line_is_left_out(tmp_path, name):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    before = read_story(run_dir)
    with (run_dir.path / name).open("a") as file:
        file.write('{"event": "train", "step": 55, "sentences": [')
    after = read_story(run_dir)
    assert (after.samples, after.starts, after.curves.newest) == (before.samples, before.starts, before.curves.newest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["run.json", "config.yaml", "divergence.json", "evaluation/test.json", "tracking.json"]
)
def test_a_damaged_file_says_nothing(tmp_path, name):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    (run_dir.path / name).write_text('{"step": [', encoding="utf-8")
    assert "</html>" in run_page(read_story(run_dir))


def test_a_folder_with_nothing_but_its_settings_has_a_page(tmp_path):
    write_run(tmp_path / "whole", num_steps=50)
    run_dir = RunDir(tmp_path / "new")
    run_dir.path.mkdir()
    shutil.copy(tmp_path / "whole" / "config.yaml", run_dir.config)
    page = run_page(read_story(run_dir))
    for words in ("No step was recorded yet", "There is no checkpoint", "No sample translations were written"):
        assert words in page


def test_records_of_other_shapes_are_no_reason_to_fail(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    append(run_dir.samples, [{"event": "samples", "step": 51, "sentences": ["text", {"fixed": True}]}])
    append(run_dir.samples, [{"event": "samples", "step": 52}])
    append(run_dir.history, [{"event": "start"}, {"event": "end"}])
    append(run_dir.metrics, [{"event": "elsewhere", "step": 60, "x": 1}, {**train_record(65), "loss": None}])
    assert "</html>" in run_page(read_story(run_dir))


def test_only_settings_that_are_not_the_defaults_differ(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=50, **{"optimizer.beta2": 0.97})
    differing = read_story(run_dir).differing_settings
    assert differing["optimizer.beta2"] == (0.97, 0.98)
    assert differing["model.preset"] == ("tiny", "base")
    assert "model.d_model" not in differing  # as the preset has it
    assert "data.train.split" not in differing
    assert "data.prepared" not in differing


def test_secrets_are_not_in_the_story(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    slurm = "{environment: {HF_TOKEN: hidden1, PGPASSWORD: hidden4, NAME: shown}, setup: [export TOKEN=hidden5]}"
    secrets = f"slurm: {slurm}\ntracking: {{uri: 'http://me:hidden2@host'}}\n"
    run_dir.config.write_text(secrets, encoding="utf-8")
    write_json(run_dir.tracking, {"run_id": "77", "uri": "http://me:hidden3@host:5000/x"})
    page = run_page(read_story(run_dir))
    assert "hidden" not in page
    assert "shown" in page
    assert 'href="http://host:5000/x/#/runs/77"' in page


def test_a_run_that_nobody_works_on_is_not_said_to_run(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    write_json(run_dir.state, {**json.loads(run_dir.state.read_text()), "state": "running"})
    assert "running, but no rank gives a sign of life" in run_page(read_story(run_dir))
