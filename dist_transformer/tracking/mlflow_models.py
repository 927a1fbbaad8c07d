"""Checkpoints and models of a run in MLflow: references to local folders, uploaded models, registered versions.

Every call may be repeated with the effect of one. A model is identified by the SHA-256 of its folder.
"""

import json
import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model as MlflowModel

from dist_transformer.tracking.mlflow_client import TrackedRun, artifact_errors, patient_requests, translated_errors
from dist_transformer.tracking.outbox import UPLOAD_MEGABYTES, Model, Point, local_files_refused, megabytes_of
from dist_transformer.tracking.pyfunc_folder import check_translates, pyfunc_folder

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
BEST, DELETED = "best", "deleted"
DIGEST_TAG, ALIAS_TAG = "model.sha256", "dist_transformer.alias"
EXTERNAL_TAG, VERSIONS_TAG = "mlflow.model.isExternal", "mlflow.modelVersions"
MODELS_A_PAGE = 100
MOST_SECONDS_A_FILE = 120
"""Timeout of an upload: a server that keeps artifacts elsewhere forwards a file of weights before it answers."""


def log_reference(
    run: TrackedRun, name: str, parameters: dict[str, str], points: Sequence[Point], kind: str, is_best: bool = False
) -> None:
    """Creates an external logged model once: one that is complete on the server is left unchanged.

    It is not uploaded, and found in MLflow by its name, parameters and scores.
    """
    with translated_errors():
        query = f"name = '{name}' AND source_run_id = '{run.run_id}'"
        found = run.client.search_logged_models([run.experiment_id], filter_string=query)
        model = next((each for each in found if dict(each.params) == parameters), None)
        model = model or _new_model(run, name, parameters, kind, EXTERNAL_TAG, *([BEST] if is_best else []))
        if model.status != "READY":
            run.log_all_points(points, model.model_id)
            run.client.finalize_logged_model(model.model_id, "READY")


def mark_checkpoints(run: TrackedRun, best: str | None, kept: Collection[str] | None) -> None:
    """Tags the references: best=true on one of them, deleted=true on those whose folder is no longer `kept`.

    None: unknown, and the tags stay.
    """
    with translated_errors():
        for model in _models_of(run):
            if model.model_type == CHECKPOINT:
                if best is not None:
                    _set_tag(run.client, model, BEST, model.name == best)
                if kept is not None:
                    _set_tag(run.client, model, DELETED, model.name not in kept)


def log_model(run: TrackedRun, model: Model) -> None:
    """Uploads a model that MLflow can serve and registers it on request; of too large a model only a reference is made.

    Raises ServerRefused if the model is to be registered and cannot translate: then nothing is uploaded.
    """
    shutil.rmtree(model.upload, ignore_errors=True)  # left by an upload that was killed
    with local_files_refused(model.folder):
        megabytes = megabytes_of(model.folder)
    if megabytes > UPLOAD_MEGABYTES:
        log_reference(run, _name(model.folder), _parameters(model), (), "model")
        kind = "registered" if model.register_as else "uploaded"
        logger.warning(
            "%s is not %s: %.0f MB, above the %d MB that are uploaded; MLflow has its path and digest",
            *(model.folder, kind, megabytes, UPLOAD_MEGABYTES),
        )
        return
    with translated_errors():
        _log_and_register(run, model)


def _log_and_register(run: TrackedRun, model: Model) -> None:
    same = (each for each in _models_of(run) if each.params.get("sha256") == model.sha256)
    logged = next((each for each in same if EXTERNAL_TAG not in each.tags and each.status != "FAILED"), None)
    is_complete = logged is not None and logged.status == "READY"
    version = None
    if is_complete and model.register_as:
        found = run.client.search_model_versions(f"name = '{model.register_as}' AND run_id = '{run.run_id}'")
        version = next((each for each in found if each.tags.get(DIGEST_TAG) == model.sha256), None)
    if not is_complete or (model.register_as and version is None):
        with local_files_refused(model.folder), pyfunc_folder(model.folder, model.decoding, model.upload) as folder:
            if model.register_as:
                check_translates(folder)
            if logged is None or not is_complete:
                logged = logged or _new_model(run, _name(model.folder), _parameters(model), "model")
                logged = _upload(run, model, logged, folder)
    if model.register_as and logged is not None:
        _set_alias(run.client, model, version or _new_version(run, model, logged))


def _new_model(run: TrackedRun, name: str, parameters: dict[str, str], kind: str, *tags: str) -> LoggedModel:
    said = dict.fromkeys(tags, "true")
    return run.client.create_logged_model(
        run.experiment_id, name=name, source_run_id=run.run_id, params=parameters, tags=said, model_type=kind
    )


def _upload(run: TrackedRun, model: Model, logged: LoggedModel, folder: Path) -> LoggedModel:
    file = folder / "MLmodel"
    content = MlflowModel.load(str(file))
    content.run_id, content.model_id, content.model_uuid = run.run_id, logged.model_id, logged.model_id
    content.artifact_path = logged.artifact_location
    content.save(str(file))
    with artifact_errors(), patient_requests(MOST_SECONDS_A_FILE):
        run.client.log_model_artifacts(logged.model_id, str(folder))
    outputs = run.client.get_run(run.run_id).outputs
    if logged.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
        run.client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, model.step)])
    return run.client.finalize_logged_model(logged.model_id, "READY")


def _new_version(run: TrackedRun, model: Model, logged: LoggedModel) -> ModelVersion:
    client, name = run.client, str(model.register_as)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name,
        # Not models:/<id>: a store without a server would resolve that at MLflow's global address, not at this one.
        source=logged.artifact_location,
        run_id=run.run_id,
        tags={DIGEST_TAG: model.sha256},
        await_creation_for=0,
        model_id=logged.model_id,
    )
    _show_version(client, logged, version)
    logger.info("MLflow: %s is version %s of the registered model %s", model.folder, version.version, name)
    return version


def _show_version(client: MlflowClient, logged: LoggedModel, version: ModelVersion) -> None:
    """Sets the tag by which MLflow's pages link a model to its versions; a server sets it itself, a store does not."""
    shown = json.loads(client.get_logged_model(logged.model_id).tags.get(VERSIONS_TAG, "[]"))
    if all((entry["name"], str(entry["version"])) != (version.name, str(version.version)) for entry in shown):
        shown.append({"name": version.name, "version": version.version})
        client.set_logged_model_tags(logged.model_id, {VERSIONS_TAG: json.dumps(shown)})


def _set_alias(client: MlflowClient, model: Model, version: ModelVersion) -> None:
    """Sets the alias once, so that a repeated delivery does not take it from a version that a user gave it to since."""
    if model.alias and (model.by_hand or version.tags.get(ALIAS_TAG) != model.alias):
        client.set_registered_model_alias(version.name, model.alias, version.version)
        client.set_model_version_tag(version.name, version.version, ALIAS_TAG, model.alias)


def _models_of(run: TrackedRun) -> Iterator[LoggedModel]:
    wanted: dict[str, Any] = {"filter_string": f"source_run_id = '{run.run_id}'", "max_results": MODELS_A_PAGE}
    token: str | None = ""
    while token is not None:
        page = run.client.search_logged_models([run.experiment_id], **wanted, page_token=token or None)
        yield from page
        token = page.token or None


def _set_tag(client: MlflowClient, model: LoggedModel, tag: str, wanted: bool) -> None:
    if wanted and tag not in model.tags:
        client.set_logged_model_tags(model.model_id, {tag: "true"})
    if not wanted and tag in model.tags:
        client.delete_logged_model_tag(model.model_id, tag)


def _parameters(model: Model) -> dict[str, str]:
    return {"path": str(model.folder), "sha256": model.sha256, "step": str(model.step)}


def _name(folder: Path) -> str:
    """The folder's name, without the characters that MLflow does not accept in the name of a model."""
    return "".join("_" if character in "/:.%\"'" else character for character in folder.name)
