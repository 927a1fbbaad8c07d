"""Stores made once and copied, as MLflow's migrations take seconds, and servers over them, not started yet."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_server import Postgres, Server

from dist_transformer.run.folder import RunDir
from dist_transformer.tracking import shipper


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture(scope="module")
def sqlite_server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "server.db")
    server = Server(folder, f"sqlite:///{folder}/server.db")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Skips or fails, as is asked for, where there is no PostgreSQL."""
    postgres = Postgres()
    server = Server(tmp_path_factory.mktemp("server"), postgres.create("mlflow"))
    yield server
    server.stop()
    postgres.stop()


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for new points and for the server more often than a real run does."""
    monkeypatch.setattr(shipper, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(shipper, "LONGEST_WAIT_SECONDS", 1.0)


@pytest.fixture(autouse=True)
def no_address_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "a_run")
    run_dir.path.mkdir(parents=True)
    return run_dir


@pytest.fixture
def stored_run_dir(run_dir: RunDir, empty_database: Path) -> RunDir:
    """A run folder beside a store that exists already."""
    shutil.copy(empty_database, run_dir.path.parent / "mlflow.db")
    return run_dir


@pytest.fixture(autouse=True)
def no_code_of_a_loaded_model() -> Iterator[None]:
    """MLflow puts the code that a model brings in front of our own, for good: a part of the package hides the whole."""
    before = [*sys.path]
    yield
    sys.path[:] = before
