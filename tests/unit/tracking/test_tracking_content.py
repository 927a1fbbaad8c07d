"""What of a run is on a real sqlite store: its description, corpora, checkpoints, samples and report; its identity."""

import getpass
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run
from tracking_helpers import TimedTracker, curves_in_file, curves_on_server, run_id_of, settings_of, store_of, train

from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event
from dist_transformer.tracking import messages, mlflow_models
from dist_transformer.tracking.mlflow_client import TrackedRun
from dist_transformer.tracking.outbox import ServerRefused
from dist_transformer.tracking.tracker import Tracker, description, sync

UID = "id of this run"
CORPORA = [
    {"name": "multi30k", "context": "training", "digest": "a" * 64, "source": "/data/multi30k", "rows": 29000},
    {"name": "valid", "context": "validation", "digest": "b" * 64, "source": "/data/valid", "rows": 1014},
]


@pytest.fixture
def client(stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    # MLflow's own readers (load_table, list_artifacts) look there, not in the client.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_of(stored_run_dir))
    return MlflowClient(tracking_uri=store_of(stored_run_dir))


@pytest.fixture(params=["once", "twice"])
def delivered(request: pytest.FixtureRequest, stored_run_dir: RunDir, client: MlflowClient) -> Callable[..., Run]:
    """Ends what a test told a tracker, delivers it, in one case once more, and gives the run on the server."""

    def deliver(tracker: Tracker) -> Run:
        tracker.close("FINISHED")
        if request.param == "twice":
            deliver_again(stored_run_dir)
        return client.get_run(run_id_of(stored_run_dir))

    return deliver


def deliver_again(run_dir: RunDir) -> None:
    """As after a crash between each delivery and the note of it."""
    write_json(run_dir.tracking, read_json(run_dir.tracking) | {"spool_offset": 0})
    assert sync(run_dir, settings_of(None), run_dir.path.parent).events > 0


def tracker_of(run_dir: RunDir, run_id: str = UID) -> Tracker:
    return TimedTracker(run_dir, settings_of(None), "a run", run_dir.path.parent, run_id)


def started(run_dir: RunDir, parameters: dict[str, str] | None = None, **tags: str) -> Tracker:
    tracker = tracker_of(run_dir)
    tracker.start(parameters or {}, tags, "model: base\n", CORPORA)
    return tracker


def models_of(client: MlflowClient, run: Run) -> dict[str, LoggedModel]:
    found = client.search_logged_models([run.info.experiment_id])
    assert len({model.name for model in found}) == len(found), "a logged model is there twice"
    return {model.name: model for model in found}


def artifact(client: MlflowClient, run: Run, name: str, folder: Path) -> str:
    return Path(client.download_artifacts(run.info.run_id, name, str(folder))).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_folder_of_which_only_a_checkpoint_was_copied_goes_on_in_the_same_run(
    stored_run_dir: RunDir, client: MlflowClient
) -> None:
    tracker = started(stored_run_dir)
    train(MetricsLog(stored_run_dir.metrics), range(1, 21))
    tracker.close("SCHEDULED")
    elsewhere = RunDir(stored_run_dir.path.parent / "copy")
    tracker = tracker_of(elsewhere)  # its run_id is the checkpoint's
    tracker.start({}, {}, "")
    train(MetricsLog(elsewhere.metrics), range(13, 31))  # the checkpoint was older than the newest points
    tracker.close("FINISHED")
    assert run_id_of(elsewhere) == run_id_of(stored_run_dir)
    curve = curves_on_server(store_of(stored_run_dir), run_id_of(elsewhere))["train/loss"]
    assert [(step, value) for step, value, _ in curve] == [(step, 10 / step) for step in range(1, 31)]


@pytest.mark.slow
def test_what_a_run_folder_remembers_goes_before_the_id_it_is_given(stored_run_dir: RunDir) -> None:
    started(stored_run_dir).close("SCHEDULED")
    first = run_id_of(stored_run_dir)
    tracker = tracker_of(stored_run_dir, "another id")
    tracker.start({}, {}, "")
    tracker.close("FINISHED")
    assert run_id_of(stored_run_dir) == first
    assert read_json(stored_run_dir.tracking)["run_uid"] == UID


def test_sync_finds_the_run_by_the_id_in_run_json(stored_run_dir: RunDir) -> None:
    started(stored_run_dir).close("SCHEDULED")
    first = run_id_of(stored_run_dir)
    stored_run_dir.tracking.unlink()
    write_json(stored_run_dir.state, {"run_id": UID})
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    assert sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).run_id == first
    assert curves_on_server(store_of(stored_run_dir), first) == curves_in_file(stored_run_dir)


def test_corpora_are_inputs_of_the_run_with_digest_context_and_counts(
    stored_run_dir: RunDir, delivered: Callable[..., Run]
) -> None:
    run = delivered(started(stored_run_dir))
    stored = {entry.dataset.name: entry for entry in run.inputs.dataset_inputs}
    assert len(run.inputs.dataset_inputs) == len(CORPORA)
    for corpus in CORPORA:
        entry = stored[str(corpus["name"])]
        assert str(corpus["digest"]).startswith(entry.dataset.digest)
        assert {tag.key: tag.value for tag in entry.tags} == {"mlflow.data.context": corpus["context"]}
        assert json.loads(entry.dataset.profile) == {"digest": corpus["digest"], "rows": corpus["rows"]}
    assert mlflow.data.get_source(stored["multi30k"].dataset)._get_source_type() == "local"


def test_long_parameters_are_cut_and_all_are_whole_in_an_artifact(
    stored_run_dir: RunDir, delivered: Callable[..., Run], client: MlflowClient, tmp_path: Path
) -> None:
    parameters = {"data.train.source": "x" * 900, "run.seed": "3"}
    run = delivered(started(stored_run_dir, parameters))
    assert run.data.params == {"data.train.source": "x" * 500, "run.seed": "3"}
    assert json.loads(artifact(client, run, "parameters.json", tmp_path)) == parameters


def test_parameters_that_are_short_need_no_artifact(stored_run_dir: RunDir, client: MlflowClient) -> None:
    started(stored_run_dir, {"run.seed": "3"}).close("FINISHED")
    assert [file.path for file in client.list_artifacts(run_id_of(stored_run_dir))] == ["config.yaml"]


def test_the_tags_that_mlflow_has_columns_for_are_set(
    stored_run_dir: RunDir, delivered: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/__main__.py", "train", "small.yaml"])
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    tags = delivered(started(stored_run_dir, git_commit="5dd557e")).data.tags
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["mlflow.source.name"] == "dist-transformer train small.yaml"
    assert tags["mlflow.source.type"] == "JOB"
    assert tags["mlflow.source.git.commit"] == tags["git_commit"] == "5dd557e"


def test_a_user_without_a_name_has_no_tag(
    stored_run_dir: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise OSError("no username set in the environment")

    monkeypatch.setattr(getpass, "getuser", nameless)
    started(stored_run_dir).close("FINISHED")
    assert "mlflow.user" not in client.get_run(run_id_of(stored_run_dir)).data.tags


def test_the_description_says_what_the_run_is(tmp_path: Path) -> None:
    tags = {"num_ranks": "16", "languages": "en-de", "model": "big", "num_parameters": "213000000", "host": "n1"}
    text = description(tags, CORPORA, tmp_path)
    assert text.splitlines()[:3] == [
        "big model of 213,000,000 parameters, en-de, 16 ranks",
        "- multi30k (training): 29,000 rows",
        "- valid (validation): 1,014 rows",
    ]
    assert text.endswith(f":{tmp_path}")


def test_the_description_is_kept_up_to_date_until_a_person_writes_another(
    stored_run_dir: RunDir, client: MlflowClient
) -> None:
    def note_after_a_start(preset: str) -> str:
        started(stored_run_dir, model=preset).close("SCHEDULED")
        return str(client.get_run(run_id_of(stored_run_dir)).data.tags["mlflow.note.content"])

    assert note_after_a_start("base").startswith("base model")
    assert note_after_a_start("big").startswith("big model")
    client.set_tag(run_id_of(stored_run_dir), "mlflow.note.content", "diverged, do not use")
    assert note_after_a_start("base") == "diverged, do not use"


def test_one_checkpoint_is_the_best_and_those_no_longer_kept_are_marked(
    stored_run_dir: RunDir, delivered: Callable[..., Run], client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_models, "MODELS_A_PAGE", 2)
    tracker = started(stored_run_dir)
    kept: list[str] = []
    for step, is_best in ((10, True), (20, True), (30, False), (40, False)):
        kept = [*kept, f"step_{step:08d}"][-2:]
        tracker.checkpoint_saved(step, stored_run_dir.checkpoints / kept[-1], {"loss": 1 / step}, is_best, kept)
    models = models_of(client, delivered(tracker))
    assert [name for name, model in models.items() if model.tags.get("best") == "true"] == ["step_00000020"]
    deleted = {name for name, model in models.items() if model.tags.get("deleted") == "true"}
    assert deleted == {"step_00000010", "step_00000020"}
    assert all(model.model_type == "checkpoint" and model.status == "READY" for model in models.values())


@pytest.mark.slow
@pytest.mark.parametrize("last_one", ["sent", "damaged", "refused"])
def test_of_checkpoints_that_wait_the_last_ones_set_the_tags_of_all(
    stored_run_dir: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, last_one: str
) -> None:
    """Each lists all models of the run. Lost is nothing, even if the last one never gets there."""
    listed, models_of_run, log_reference = [], mlflow_models._models_of, mlflow_models.log_reference

    def counted(run: TrackedRun) -> Iterator[LoggedModel]:
        listed.append(run)
        return models_of_run(run)

    def refused(run: TrackedRun, name: str, *values: Any) -> None:
        if (last_one, name) == ("refused", "step_00000060"):
            raise ServerRefused("not this one")
        log_reference(run, name, *values)

    monkeypatch.setattr(mlflow_models, "_models_of", counted)
    monkeypatch.setattr(mlflow_models, "log_reference", refused)
    kept: list[str] = []
    for step in range(10, 70, 10):
        kept = [*kept, f"step_{step:08d}"][-2:]
        said = {"path": kept[-1], "step": step, "metrics": {}, "is_best": step in (10, 20, 40), "kept": kept}
        if (last_one, step) == ("damaged", 60):
            del said["step"]
        add_event(stored_run_dir.tracking_events, "checkpoint", said)
    for _ in range(2):
        with suppress(ServerRefused):  # for the first time
            sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    run = client.get_run(run_id_of(stored_run_dir))
    models = models_of(client, run)
    steps = range(10, 70 if last_one == "sent" else 60, 10)
    assert {*models} == {f"step_{step:08d}" for step in steps}
    assert [name for name in models if "best" in models[name].tags] == ["step_00000040"]
    assert run.data.tags["best_checkpoint"] == "step_00000040"
    known = kept if last_one != "damaged" else ["step_00000040", "step_00000050"]
    assert {name for name in models if "deleted" not in models[name].tags} == {*known} & {*models}
    assert len(listed) == (3 if last_one == "refused" else 2)


def test_a_checkpoint_that_was_deleted_and_written_again_is_no_longer_marked(
    stored_run_dir: RunDir, delivered: Callable[..., Run], client: MlflowClient
) -> None:
    tracker = started(stored_run_dir)
    for kept in (["step_00000010"], [], ["step_00000010"]):
        tracker.checkpoint_saved(10, stored_run_dir.checkpoints / "step_00000010", {}, False, kept)
    assert "deleted" not in models_of(client, delivered(tracker))["step_00000010"].tags


@pytest.mark.slow
def test_lines_that_an_earlier_version_left_in_the_spool_are_delivered(
    stored_run_dir: RunDir, client: MlflowClient, tmp_path: Path
) -> None:
    stored_run_dir.model.mkdir()
    (stored_run_dir.model / "config.json").write_text("{}")
    path = stored_run_dir.checkpoints / "step_00000010"
    old: list[tuple[str, dict[str, Any]]] = [
        ("start", {"parameters": {"run.seed": "3"}, "tags": {"languages": "en-de"}, "config": "model: base\n"}),
        ("checkpoint", {"step": 10, "path": str(path), "metrics": {"loss": 2.5}}),
        ("model", {"step": 10, "path": str(stored_run_dir.model), "metrics": {"bleu": 27.5}}),
        ("status", {"status": "FINISHED"}),
    ]
    for event, details in old:
        add_event(stored_run_dir.tracking_events, event, details)
    assert sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).events == len(old)
    run = client.get_run(run_id_of(stored_run_dir))
    assert (run.info.status, run.data.params) == ("FINISHED", {"run.seed": "3"})
    assert {name: model.status for name, model in models_of(client, run).items()} == {
        "step_00000010": "READY",
        "model": "READY",
    }


def sample(step: int, corpus: str, number: int) -> dict[str, Any]:
    texts = {"source": f"Zwei {number}", "reference": f"Two {number}", "translation": f"„{step}“"}
    return {"corpus": corpus, "sentences": [{"number": number, "fixed": number == 1, **texts}]}


def test_samples_are_one_table_of_all_validations(
    stored_run_dir: RunDir, delivered: Callable[..., Run], client: MlflowClient
) -> None:
    tracker, samples = started(stored_run_dir), MetricsLog(stored_run_dir.samples)
    for step in (10, 20):
        for corpus, number in (("validation", 1), ("newstest", 7)):
            samples.append("samples", step, sample(step, corpus, number))
        tracker.samples_written(step)
    run = delivered(tracker)
    table = client.load_table(run.info.experiment_id, "samples.json", [run.info.run_id])
    assert list(table.columns) == ["step", "corpus", "number", "fixed", "source", "reference", "translation"]
    assert table.to_numpy().tolist() == [
        [step, corpus, number, number == 1, f"Zwei {number}", f"Two {number}", f"„{step}“"]
        for step in (10, 20)
        for corpus, number in (("validation", 1), ("newstest", 7))
    ]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]


def test_of_many_samples_the_newest_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at each validation would be bytes by the square of the number of validations."""
    samples = MetricsLog(tmp_path / "samples.jsonl")
    for step in range(100, 200):
        samples.append("samples", step, sample(step, "validation", 1))
    everything = [row[0] for row in messages.sample_rows(samples.path)]
    assert everything == [*range(100, 200)]
    newest = samples.path.read_bytes().splitlines(keepends=True)[-10:]
    monkeypatch.setattr(messages, "SAMPLES_BYTES", len(b"".join(newest)) + 5)
    assert [row[0] for row in messages.sample_rows(samples.path)] == [*range(190, 200)]


def test_of_samples_that_wait_the_last_are_sent_which_hold_all(stored_run_dir: RunDir, client: MlflowClient) -> None:
    samples = MetricsLog(stored_run_dir.samples)
    for step in (10, 20, 30):
        samples.append("samples", step, sample(step, "validation", 1))
        add_event(stored_run_dir.tracking_events, "samples", {"step": step})
    add_event(stored_run_dir.tracking_events, "status", {"status": "FINISHED"})
    sent = sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
    assert sent.events == 2
    experiment = client.get_run(sent.run_id).info.experiment_id
    assert client.load_table(experiment, "samples.json", [sent.run_id])["step"].tolist() == [10, 20, 30]
    assert sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent).events == 0


def test_the_newest_of_two_evaluations_of_a_model_is_its_score(stored_run_dir: RunDir, client: MlflowClient) -> None:
    started(stored_run_dir).close("FINISHED")
    for bleu in (31.5, 29.5):
        scores = {"name": "test", "step": 900, "metrics": {"bleu": bleu}}
        add_event(stored_run_dir.tracking_events, "evaluation", scores)
        sync(stored_run_dir, settings_of(None), stored_run_dir.path.parent)
        time.sleep(0.002)  # the time of an event is in milliseconds
    deliver_again(stored_run_dir)
    run_id = run_id_of(stored_run_dir)
    assert client.get_run(run_id).data.metrics["evaluation/test/bleu"] == 29.5
    assert [point.value for point in client.get_metric_history(run_id, "evaluation/test/bleu")] == [31.5, 29.5]


def test_the_report_is_an_artifact(
    stored_run_dir: RunDir, delivered: Callable[..., Run], client: MlflowClient, tmp_path: Path
) -> None:
    stored_run_dir.report.write_text("<html/>")
    tracker = started(stored_run_dir)
    tracker.report_written()
    assert artifact(client, delivered(tracker), "report.html", tmp_path) == "<html/>"


@pytest.mark.slow
def test_a_run_folder_that_moved_before_its_history_was_sent_sends_its_files_from_there(
    stored_run_dir: RunDir, client: MlflowClient
) -> None:
    tracker = TimedTracker(stored_run_dir, settings_of("http://127.0.0.1:9"), "a run", stored_run_dir.path.parent, UID)
    tracker.close_seconds = 1
    tracker.start({}, {}, "")
    stored_run_dir.report.write_text("<html/>")
    stored_run_dir.model.mkdir()
    (stored_run_dir.model / "config.json").write_text("{}")
    tracker.report_written()
    tracker.model_written(stored_run_dir.model)
    tracker.close("FINISHED")
    moved = RunDir(Path(shutil.move(stored_run_dir.path, stored_run_dir.path.parent / "moved")))
    sent = sync(moved, settings_of(None), moved.path.parent)
    run = client.get_run(sent.run_id)
    assert "report.html" in [file.path for file in client.list_artifacts(sent.run_id)]
    assert models_of(client, run)["model"].params["path"] == str(moved.model)
