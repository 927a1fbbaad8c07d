"""Reports to MLflow what a start did not: its end, if it was killed, or all of it, if it was not tracked."""

from pathlib import Path

from dist_transformer.config.credentials import without_credentials
from dist_transformer.config.loading import flatten, load_config
from dist_transformer.config.schema import TrackingConfig
from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import add_event, read_records, read_records_from
from dist_transformer.run.records import read_record
from dist_transformer.tracking.shipper import BackgroundShipper, Shipper
from dist_transformer.tracking.tracker import delivery_state_of, target_of, usable_model

_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "SCHEDULED"}


def status_said(run_dir: RunDir) -> str | None:
    """The status last reported to MLflow, or to be reported once it answers; None: the run was never tracked."""
    events = [*read_records(run_dir.tracking_events, "start", "status")]
    return str(events[-1].get("status", "RUNNING")) if events else None


def add_untracked(run_dir: RunDir) -> None:
    """Adds to the outbox what is known of a run that was trained without tracking: settings, samples, model, status."""
    config, events, said = load_config(run_dir.config, check_files=False), run_dir.tracking_events, status_said(run_dir)
    if said is None:
        settings = flatten(config.model_dump(mode="json")).items()
        parameters = {key: without_credentials(str(value)) for key, value in settings if value is not None}
        text = without_credentials(run_dir.config.read_text(encoding="utf-8"))
        add_event(events, "start", {"parameters": parameters, "tags": {"model": config.model.preset}, "config": text})
        add_event(events, "samples", {})
        if run_dir.model.is_dir() and (model := usable_model(run_dir, config.tracking, run_dir.model)):
            add_event(events, "model", model)
    status = _STATUSES.get(str(read_record(run_dir.state).get("state")), said)
    if status != said and not (said and config.tracking.enabled):
        add_event(events, "status", {"status": status})


def settle(run_dir: RunDir, status: str, settings: TrackingConfig, default_store: Path, seconds: float) -> str | None:
    """Sets the status and sends everything undelivered, for at most `seconds`; returns the reason of a failure.

    Nobody may train in the run folder meanwhile. Undelivered events stay there for the next start, or `sync`. Raises
    OSError: the run folder cannot be written.
    """
    try:
        target = target_of(settings, run_dir, default_store)
        state = delivery_state_of(run_dir)
    except UserError as error:  # an invalid address in the variable must not stop the calling command
        return str(error)
    address = without_credentials(target.uri)
    if state.is_followed_elsewhere(address):
        return f"the run is followed at {state.uri}, and here tracking.uri or MLFLOW_TRACKING_URI name {address}"
    if status_said(run_dir) != status:
        add_event(run_dir.tracking_events, "status", {"status": status})
    if has_arrived(run_dir):
        return None
    import dist_transformer.tracking.mlflow_client  # noqa: F401  (takes seconds, which must not count against the server's)

    shipper = BackgroundShipper(Shipper(run_dir, target, state))
    shipper.start()
    return None if shipper.close(seconds) else f"no answer; later: dist-transformer track sync {run_dir.quoted}"


def has_arrived(run_dir: RunDir) -> bool:
    """True if MLflow has received all events of starts, checkpoints and ends."""
    return next(read_records_from(run_dir.tracking_events, delivery_state_of(run_dir).outbox_offset), None) is None
