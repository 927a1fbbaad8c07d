"""A store made once and copied: MLflow's migrations take seconds."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dist_transformer.run_dir import RunDir


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture(autouse=True)
def no_address_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "a_run")


@pytest.fixture
def stored_run_dir(run_dir: RunDir, empty_database: Path) -> RunDir:
    """A run folder beside a store that exists already."""
    run_dir.path.mkdir(parents=True)
    shutil.copy(empty_database, run_dir.path.parent / "mlflow.db")
    return run_dir
