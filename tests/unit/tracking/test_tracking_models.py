"""Model folders in MLflow, on a real sqlite store: uploaded once, loaded again, registered once, with an alias."""

import ast
import errno
import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow_server import Server
from tracking_helpers import TimedTracker, curves_in_file, curves_on_server, run_id_of, settings_of, store_of, train

from dist_transformer.cli.tracking_verbs import model_command, sync_command
from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.config.schema import Config, DecodingConfig, ModelConfig, TrackingConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event
from dist_transformer.tracking import messages, mlflow_models, pyfunc_folder
from dist_transformer.tracking.messages import folder_digest
from dist_transformer.tracking.outbox import (
    CannotBeSent,
    FolderTrouble,
    ServerRefused,
    ServerTrouble,
    local_files_refused,
)
from dist_transformer.tracking.pyfunc_folder import REQUIREMENTS
from dist_transformer.tracking.tracker import BUSY_SECONDS, log_model, sync

pytestmark = pytest.mark.slow

UID = "id of this run"
DECODING = {"beam_size": 2, "length_penalty": 0.5, "max_extra_tokens": 5, "max_tokens": 512}


@pytest.fixture
def client(stored_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    # MLflow's own readers (pyfunc.load_model, list_artifacts) look there, not in the client.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_of(stored_run_dir))
    return MlflowClient(tracking_uri=store_of(stored_run_dir))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a real tokenizer: what it says makes no sense, but it can be loaded and asked."""
    folder = tmp_path_factory.mktemp("model")
    sentences = (sentence for pair in islice(demo_pairs("train"), 300) for sentence in pair)
    train_tokenizer(sentences, TokenizerConfig(vocabulary_size=120), folder / "pieces.model")
    size = Tokenizer.load(folder / "pieces.model").source_vocabulary
    torch.manual_seed(1)
    config = ModelConfig(d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    model = Transformer(config, size, size, pad_id=0)
    information = ModelInformation(size, size, 0, 1, 2, "en", "de", step=900)
    weights = dict(model.named_parameters())
    save_model_folder(folder / "model", weights, config, TokenizerFiles(folder / "pieces.model"), information)
    return folder / "model"


@pytest.fixture
def finished(stored_run_dir: RunDir, model_folder: Path, client: MlflowClient) -> RunDir:
    """A run folder with a model, as training leaves it."""
    shutil.copytree(model_folder, stored_run_dir.model)
    files = {"source": "a.en", "target": "a.de"}
    data = {"source_language": "en", "target_language": "de", "train": files, "validation": files}
    config = Config.model_validate({"data": data, "decoding": DECODING})
    stored_run_dir.config.write_text(to_yaml(config))
    train(MetricsLog(stored_run_dir.metrics), range(1, 6))
    return stored_run_dir


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are registered without the translation in a new process, which other tests are about."""
    monkeypatch.setattr(mlflow_models, "check_translates", lambda folder: None)


def deliver(run_dir: RunDir, close_seconds: int = TimedTracker.close_seconds, **settings: Any) -> str:
    """What a start of training says at its end; the id of the run in MLflow."""
    tracker = TimedTracker(run_dir, TrackingConfig.model_validate(settings), "a run", run_dir.path.parent, UID)
    tracker.close_seconds = close_seconds
    tracker.start({}, {}, "")
    tracker.model_written(run_dir.model)
    tracker.close("FINISHED")
    return run_id_of(run_dir)


def deliver_again(run_dir: RunDir) -> None:
    """As after a crash between each delivery and the note of it."""
    write_json(run_dir.tracking, read_json(run_dir.tracking) | {"spool_offset": 0})
    assert sync(run_dir, settings_of(None), run_dir.path.parent).events == 3


def only_model(client: MlflowClient, run_id: str) -> LoggedModel:
    (model,) = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    return model


def versions(client: MlflowClient) -> list[str]:
    return sorted(str(version.version) for version in client.search_model_versions("name = 'translator'"))


def champion(client: MlflowClient) -> str:
    return str(client.get_model_version_by_alias("translator", "champion").version)


def test_a_model_is_logged_once_with_signature_example_and_a_link_to_its_run(
    finished: RunDir, client: MlflowClient
) -> None:
    run_id = deliver(finished)
    deliver_again(finished)
    model, run = only_model(client, run_id), client.get_run(run_id)
    assert run.info.artifact_uri.startswith((finished.path.parent / "mlartifacts").as_uri())
    assert (model.name, model.status, model.source_run_id) == ("model", "READY", run_id)
    assert model.params == {"path": str(finished.model), "sha256": folder_digest(finished.model), "step": "900"}
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model.model_id, 900)]
    assert run.data.tags["model.path"] == str(finished.model)
    assert run.data.tags["model.sha256"] == model.params["sha256"]
    information = mlflow.models.get_model_info(model.model_uri)
    assert (information.model_id, information.run_id) == (model.model_id, run_id)
    for schema in (information.signature.inputs, information.signature.outputs):
        assert schema.to_dict() == [{"type": "string", "required": True}]
    assert information.saved_input_example_info is not None


def test_a_loaded_model_translates_as_the_run_is_configured(finished: RunDir, client: MlflowClient) -> None:
    model = only_model(client, deliver(finished))
    loaded = mlflow.pyfunc.load_model(model.model_uri)
    assert loaded.model_config == DecodingConfig(**DECODING).model_dump(mode="json")
    sentences = ["It is nine o'clock.", "", "twenty-one"]
    answers = loaded.predict(sentences)
    assert len(answers) == 3
    assert answers[1] == ""
    assert answers == loaded.predict(mlflow.pyfunc.pandas.DataFrame({"text": sentences}))
    greedy = mlflow.pyfunc.load_model(model.model_uri, model_config={"beam_size": 1, "max_extra_tokens": 0})
    assert greedy.predict(sentences) != answers


def test_the_code_that_a_model_brings_imports_only_the_packages_that_it_names(
    finished: RunDir, client: MlflowClient, tmp_path: Path
) -> None:
    model = only_model(client, deliver(finished))
    folder = Path(mlflow.artifacts.download_artifacts(model.model_uri, dst_path=str(tmp_path)))
    named = {line.split("==")[0] for line in (folder / "requirements.txt").read_text().splitlines()}
    assert named == set(REQUIREMENTS)
    imported = {top for file in (folder / "code").rglob("*.py") for top in packages_imported_by(file)}
    ours_or_python = {*sys.stdlib_module_names, "dist_transformer"}
    ours_or_python.add("triton")  # torch's build for GPUs brings it; where it is not, torch's own kernels are taken
    distributions = importlib.metadata.packages_distributions()
    needed = {distributions[name][0].lower() for name in imported - ours_or_python}
    assert needed - {"pydantic_core", "pydantic-core"} == named - {"mlflow"}  # pydantic names the one that fits it


def packages_imported_by(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in whole | parts}


def test_a_model_is_registered_once_with_its_alias_which_a_person_may_move(
    finished: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.path.parent)
    finished = RunDir(Path(finished.path.name))  # a relative folder, as that of run.root: runs
    run_id = deliver(finished, register_as="translator", alias="champion")
    version = client.get_model_version_by_alias("translator", "champion")
    model = only_model(client, run_id)
    assert (str(version.version), version.run_id, version.source) == ("1", run_id, model.artifact_location)
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "translator", "version": version.version}]
    assert len(mlflow.pyfunc.load_model("models:/translator@champion").predict(["twenty-one"])) == 1
    client.delete_registered_model_alias("translator", "champion")
    monkeypatch.setattr(mlflow_models, "check_translates", forbidden)  # nothing is built or checked again
    deliver_again(finished)
    assert versions(client) == ["1"]
    assert client.get_registered_model("translator").aliases == {}
    assert only_model(client, run_id).model_id == model.model_id


@pytest.mark.usefixtures("unchecked")
def test_a_crash_between_version_and_alias_is_made_good(
    finished: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_models, "_set_alias", lambda *arguments: None)
        deliver(finished, register_as="translator", alias="champion")
    deliver_again(finished)
    assert versions(client) == ["1"]
    assert champion(client) == "1"


def test_a_crash_during_the_upload_leaves_one_model_after_all(
    finished: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = iter([OSError("the connection is lost")])
    finished.upload.mkdir()
    (finished.upload / "model").write_text("left by a process that was killed")

    def lose_one(self: MlflowClient, model_id: str, local_dir: str) -> None:
        assert Path(local_dir).is_relative_to(finished.upload)
        for error in lost:
            raise error
        upload(self, model_id, local_dir)

    upload = MlflowClient.log_model_artifacts
    monkeypatch.setattr(MlflowClient, "log_model_artifacts", lose_one)
    model = only_model(client, deliver(finished))
    assert model.status == "READY"
    assert mlflow.pyfunc.load_model(model.model_uri).predict([""]) == [""]
    assert not finished.upload.exists()


def test_what_a_kill_after_the_upload_left_goes_with_the_next_delivery(finished: RunDir, client: MlflowClient) -> None:
    deliver(finished)
    (finished.upload / "model").mkdir(parents=True)
    deliver_again(finished)
    assert not finished.upload.exists()


def test_what_the_check_of_a_model_says_has_no_secret_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "the-token")
    monkeypatch.setattr(pyfunc_folder, "CHECK", "import sys; sys.exit('no the-token at http://me:hidden@host')")
    with pytest.raises(ServerRefused, match=r"is not registered: no \*\*\* at http://host$"):
        pyfunc_folder.check_translates(tmp_path)


def forbidden(*arguments: object) -> None:
    raise AssertionError("this was not to happen again")


def test_a_model_that_cannot_translate_is_neither_registered_nor_uploaded(
    finished: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    weights = finished.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run_id = deliver(finished, register_as="translator", alias="champion")
    assert client.get_run(run_id).info.status == "FINISHED"
    assert list(client.search_logged_models([client.get_run(run_id).info.experiment_id])) == []
    assert list(client.search_registered_models()) == []
    assert "the model cannot be loaded and is not registered" in caplog.text
    assert "damaged or cut short" in caplog.text


def test_a_model_that_is_too_large_is_a_reference(
    finished: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_models, "UPLOAD_MEGABYTES", 0)
    run_id = deliver(finished, register_as="translator")
    deliver_again(finished)
    model = only_model(client, run_id)
    assert (model.name, model.status, model.tags["mlflow.model.isExternal"]) == ("model", "READY", "true")
    assert model.params["sha256"] == folder_digest(finished.model)
    assert "above the 0 MB that are uploaded" in caplog.text
    assert list(client.search_registered_models()) == []


@pytest.fixture
def log_by_hand(finished: RunDir) -> Callable[..., str]:
    def log(folder: Path, **settings: Any) -> str:
        tracking = TrackingConfig.model_validate(settings)
        return log_model(finished, tracking, finished.path.parent, folder).run_id

    return log


@pytest.mark.usefixtures("unchecked")
def test_another_model_of_a_run_is_registered_by_hand_and_gets_the_alias(
    finished: RunDir, client: MlflowClient, log_by_hand: Callable[..., str], tmp_path: Path
) -> None:
    run_id = deliver(finished, register_as="translator", alias="champion")
    averaged = Path(shutil.copytree(finished.model, tmp_path / "averaged.1"))
    content = read_json(averaged / "config.json")
    write_json(averaged / "config.json", content | {"step": 600})
    assert log_by_hand(averaged, register_as="translator", alias="champion") == run_id
    assert log_by_hand(averaged) == run_id
    assert versions(client) == ["1", "2"]
    assert champion(client) == "2"
    models = {model.name: model for model in client.search_logged_models([client.get_run(run_id).info.experiment_id])}
    assert sorted(models) == ["averaged_1", "model"]
    assert models["averaged_1"].params["step"] == "600"
    assert client.get_run(run_id).data.tags["model.path"] == str(finished.model)
    log_by_hand(finished.model, register_as="translator", alias="champion")  # back again, by a person's will
    assert versions(client) == ["1", "2"]
    assert champion(client) == "1"


def test_a_run_trained_without_tracking_is_sent_later_with_settings_model_and_status(
    finished: RunDir, client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"tracking": {"enabled": False}, "run": {"root": str(finished.path.parent)}}
    config = load_config(finished.config, check_files=False).model_dump(mode="json") | settings
    finished.config.write_text(to_yaml(Config.model_validate(config)))
    write_json(finished.state, {"state": "stopped", "run_id": UID})
    sync_command(finished.path)
    run_id = run_id_of(finished)
    assert client.get_run(run_id).info.status == "SCHEDULED"
    write_json(finished.state, {"state": "finished", "run_id": UID})
    for said in ("0 points and 1 events sent", "nothing was missing"):
        sync_command(finished.path)
        assert said in capsys.readouterr().out.splitlines()[-1]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params["decoding.beam_size"]) == ("FINISHED", "2")
    assert {each.path for each in client.list_artifacts(run_id)} == {"config.yaml", "samples.json"}
    assert only_model(client, run_id).status == "READY"
    assert curves_on_server(store_of(finished), run_id) == curves_in_file(finished)


def test_a_damaged_model_of_a_run_trained_without_tracking_keeps_neither_curves_nor_status_back(
    finished: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    write_json(finished.state, {"state": "finished", "run_id": UID})
    (finished.model / "config.json").write_text("{")
    sync_command(finished.path)
    assert client.get_run(run_id_of(finished)).info.status == "FINISHED"
    assert f"MLflow does not get the model {finished.model}" in caplog.text


@pytest.mark.parametrize(
    ("name", "alias", "message"),
    [
        ("en/de", None, "tracking.register_as: expected a name without / : '; got 'en/de'"),
        ("it's", None, "tracking.register_as: expected a name without"),
        ("translator", "v1", "tracking.alias: 'v1': expected letters, digits"),
    ],
)
def test_names_that_mlflow_refuses_are_refused_before_a_model_is_uploaded(
    finished: RunDir, name: str, alias: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_command(finished.path, None, name, alias)
    assert not finished.tracking.exists()


def test_a_model_logged_by_hand_that_is_too_large_is_refused(
    log_by_hand: Callable[..., str], finished: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.outbox.UPLOAD_MEGABYTES", 0)
    with pytest.raises(UserError, match="0 MB, above the 0 MB that are uploaded; put it where others can read it"):
        log_by_hand(finished.model)


def test_a_broken_model_logged_by_hand_is_refused_with_the_cause(
    log_by_hand: Callable[..., str], finished: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_transformer.tracking.tracker.SYNC_ATTEMPTS", 1)
    (finished.model / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be loaded and is not registered") as raised:
        log_by_hand(finished.model, register_as="translator")
    assert "damaged or cut short" in str(raised.value)


def test_a_model_folder_that_cannot_be_read_does_not_end_training(
    finished: RunDir, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    (finished.model / "config.json").write_text("{")
    assert client.get_run(deliver(finished)).info.status == "FINISHED"
    assert f"MLflow does not get the model {finished.model}" in caplog.text


def test_a_model_that_this_user_may_not_read_waits_for_one_who_may(
    finished: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(file: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    given = (settings_of(None), finished.path.parent)
    TimedTracker(finished, given[0], "a run", given[1], UID).model_written(finished.model)
    with monkeypatch.context() as of_a_colleague:
        of_a_colleague.setattr(messages, "file_sha256", closed)
        with pytest.raises(UserError, match=r"(?s)Permission denied: .*config.json'.*may read and write"):
            sync(finished, *given)
    assert sync(finished, *given).events == 1
    assert only_model(client, run_id_of(finished)).status == "READY"


def test_a_file_that_this_user_may_not_read_does_not_keep_the_model_from_mlflow(
    finished: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_client: MlflowClient, _run_id: str, path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    given = (settings_of(None), finished.path.parent)
    add_event(finished.tracking_events, "profile", {"path": "profile.json"})
    (finished.path / "profile.json").write_text("{}")
    TimedTracker(finished, given[0], "a run", given[1], UID).model_written(finished.model)
    with monkeypatch.context() as of_a_colleague:
        of_a_colleague.setattr(MlflowClient, "log_artifact", closed)
        with pytest.raises(UserError, match=r"(?s)Permission denied: .*profile.json'.*may read and write"):
            sync(finished, *given)
    assert only_model(client, run_id_of(finished)).status == "READY"
    assert sync(finished, *given).events == 1


def test_a_place_that_is_closed_on_the_way_to_mlflow_is_waited_for_by_nobody(tmp_path: Path) -> None:
    for path, kind in (("/mlflow", CannotBeSent), (str(tmp_path / "model" / "config.json"), FolderTrouble)):
        with pytest.raises(ServerTrouble) as raised, local_files_refused(tmp_path / "model"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        assert raised.type is kind


def test_a_server_that_answers_gets_more_time_for_a_model(
    finished: RunDir, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = mlflow_models.log_model

    def slow(*arguments: Any) -> None:
        time.sleep(2.5)  # longer than it waits
        upload(*arguments)

    monkeypatch.setattr(mlflow_models, "log_model", slow)
    monkeypatch.setattr("dist_transformer.tracking.shipper.ANSWER_SECONDS", 0)
    monkeypatch.setattr("dist_transformer.tracking.tracker.BUSY_SECONDS", 600)  # however slow the machine is
    run_id = deliver(finished, close_seconds=1)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert only_model(client, run_id).status == "READY"


def test_a_server_that_does_not_answer_gets_no_more_time_for_a_model(finished: RunDir) -> None:
    tracker = TimedTracker(finished, settings_of("http://127.0.0.1:9"), "a run", finished.path.parent, UID)
    tracker.close_seconds = 1
    tracker.start({}, {}, "")
    tracker.model_written(finished.model)
    began = time.monotonic()
    tracker.close("FINISHED")
    assert time.monotonic() - began < BUSY_SECONDS / 2


@pytest.mark.usefixtures("unchecked")
def test_a_server_gets_corpora_checkpoints_samples_and_a_registered_model_once(
    finished: RunDir, sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_server.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_server.uri)
    client = MlflowClient(tracking_uri=sqlite_server.uri)
    settings = {"register_as": "translator", "alias": "champion"}
    tracker = TimedTracker(finished, TrackingConfig.model_validate(settings), "a run", finished.path.parent, UID)
    corpus = {"name": "multi30k", "context": "training", "digest": "a" * 64, "source": "/data/multi30k", "rows": 29000}
    tracker.start({"long": "x" * 900}, {}, "", [corpus])
    for step in (10, 20):
        name = f"step_{step:08d}"
        tracker.checkpoint_saved(step, finished.checkpoints / name, {"loss": 1 / step}, is_best=True, kept=[name])
    sentence = {"number": 1, "fixed": True, "source": "Zwei", "reference": "Two", "translation": "Two"}
    MetricsLog(finished.samples).append("samples", 20, {"corpus": "validation", "sentences": [sentence]})
    tracker.samples_written(20)
    tracker.model_written(finished.model)
    tracker.close("FINISHED")
    write_json(finished.tracking, read_json(finished.tracking) | {"spool_offset": 0})
    assert sync(finished, settings_of(None), finished.path.parent).events == 6

    run = client.get_run(run_id_of(finished))
    models = {model.name: model for model in client.search_logged_models([run.info.experiment_id])}
    assert run.info.status == "FINISHED"
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["multi30k"]
    assert {name: (model.tags.get("best"), model.tags.get("deleted")) for name, model in models.items()} == {
        "step_00000010": (None, "true"),
        "step_00000020": ("true", None),
        "model": (None, None),
    }
    assert client.load_table(run.info.experiment_id, "samples.json")["translation"].tolist() == ["Two"]
    assert versions(client) == ["1"]
    assert champion(client) == "1"
    assert mlflow.pyfunc.load_model("models:/translator@champion").predict([""]) == [""]
