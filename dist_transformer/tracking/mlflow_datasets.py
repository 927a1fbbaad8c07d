"""The corpora of a run as MLflow's dataset inputs: name, digest, source and context."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag

from dist_transformer.tracking.mlflow_client import TrackedRun, translated_errors

CONTEXT_TAG = "mlflow.data.context"
LONGEST_DIGEST = 36
"""Length limit of MLflow; the dataset's profile has the full digest."""


def log_datasets(run: TrackedRun, datasets: Sequence[Mapping[str, Any]]) -> None:
    """Logs datasets with `name`, `digest`, `source` and `context`; other values (rows, tokens) go into the profile.

    The server identifies a corpus by name and digest: logged again, it is stored once.
    """
    whole = (values for values in datasets if {"name", "digest", "source", "context"} <= values.keys())
    inputs = [DatasetInput(_dataset(values), [InputTag(CONTEXT_TAG, values["context"])]) for values in whole]
    if inputs:
        with translated_errors():
            run.client.log_inputs(run.run_id, datasets=inputs)


def _dataset(values: Mapping[str, Any]) -> Dataset:
    kind, source = _source(str(values["source"]))
    profile = {key: value for key, value in values.items() if key not in ("name", "context", "source")}
    return Dataset(
        name=values["name"],
        digest=values["digest"][:LONGEST_DIGEST],
        source_type=kind,
        source=source,
        profile=json.dumps(profile),
    )


def _source(source: str) -> tuple[str, str]:
    """Kind and description of a source in MLflow's form; JSON is already a description of ours."""
    if source.startswith("{"):
        return "corpus", source
    if source.startswith(("http://", "https://")):
        return "http", json.dumps({"url": source})
    return "local", json.dumps({"uri": source})
