"""No secret of the environment or of the server's address is in any file of a run, in any output, or in MLflow, even when
the server's errors and a crash repeat them."""

import base64
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from subprocess import Popen

import pytest
from faulty_proxy import Fault, Proxy
from mlflow_server import Server, wait_until
from running import NOT_INHERITED, Command, with_constants, without

pytestmark = pytest.mark.slow

USER = "someone"
SECRETS = {
    "address": "of-the-address-4711",
    "MLFLOW_TRACKING_PASSWORD": "of-mlflow-4712",
    "MLFLOW_TRACKING_TOKEN": "of-the-token-4713",
    "HF_TOKEN": "hf_OfTheHub4714",
    "AWS_SECRET_ACCESS_KEY": "OfTheCloud/4715+",
}
ALL_SECRETS = [*SECRETS.values(), base64.b64encode(f"{USER}:{SECRETS['MLFLOW_TRACKING_PASSWORD']}".encode()).decode()]
CRASHING = """
import os
from dist_transformer.run.metrics_log import MetricsLog

append = MetricsLog.append

def failing(log, event, step, values):
    if step == 8:
        raise RuntimeError("cannot reach " + " ".join(os.environ[name] for name in NAMES))
    append(log, event, step, values)

NAMES = ["MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"]
MetricsLog.append = failing
from dist_transformer.cli.main import main
main()
"""
"""`dist-transformer`, but that training fails at step 8 with all it should not say in its error."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, f"sqlite:///{folder}/server.db")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def environment(proxy: Proxy) -> dict[str, str]:
    secrets = {name: value for name, value in SECRETS.items() if name != "address"}
    return {**secrets, "MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_URI": address_of(proxy)}


def address_of(proxy: Proxy) -> str:
    return proxy.uri.replace("://", f"://{USER}:{SECRETS['address']}@")


@pytest.fixture(scope="module")
def said(command: Command, proxy: Proxy, environment: dict[str, str]) -> str:
    """All that a run said whose server refused it at first, that crashed when it went on, and was sent by hand."""
    header = f"Authorization: Basic {ALL_SECRETS[-1]}"
    repeated = " ".join([f"not authorized at {address_of(proxy)}:", *SECRETS.values(), header])
    settings = ("train", "small.yaml", "run.name=secrets", "tracking={enabled: true}")
    environment = {**environment, **with_constants({"tracking.tracker.CLOSE_SECONDS": 60})}
    proxy.set_fault(Fault(status=401, body=repeated))
    process = command.start(*settings, **environment)
    wait_until(lambda: proxy.met > 0)
    proxy.set_fault(Fault(status=500, body=repeated))
    wait_until(lambda: proxy.met > 0)
    proxy.set_fault(Fault(only="mlflow-artifacts", status=404, body=repeated))
    out = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, out
    proxy.set_fault(None)
    out += crashed(command, environment, *settings, "training.max_steps=10")
    proxy.set_fault(Fault(status=403, body=repeated))
    run = command.folder / "runs" / "secrets"
    out += command("track", "sync", run, code=2, **environment)
    proxy.set_fault(None)
    out += command("track", "sync", run, **environment)
    return out + command("report", run, **environment)


def crashed(command: Command, environment: dict[str, str], *arguments: str) -> str:
    process = Popen(
        [sys.executable, "-c", CRASHING, *arguments], cwd=command.folder, env={**without(NOT_INHERITED), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    return out


def assert_no_secret(content: bytes, where: str) -> None:
    for secret in ALL_SECRETS:
        assert secret.encode() not in content, f"{where} holds {secret}: {context(content, secret)}"


def context(content: bytes, secret: str) -> bytes:
    at = content.find(secret.encode())
    return content[max(0, at - 200) : at + 50]


def test_no_secret_is_said(said: str) -> None:
    assert "not authorized at http://127.0.0.1" in said, "the answer is repeated, but for the secrets"
    assert "RuntimeError: cannot reach http://127.0.0.1" in said
    assert_no_secret(said.encode(), "the output")


def test_no_secret_is_in_the_run_folder(said: str, command: Command) -> None:
    run = command.folder / "runs" / "secrets"
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {str(path.relative_to(run)) for path in files}
    assert {
        "train.log",
        "tracking.json",
        "tracking_events.jsonl",
        "report.html",
    } <= names
    for path in files:
        assert_no_secret(path.read_bytes(), str(path))


def test_no_secret_is_stored_by_mlflow(said: str, server: Server) -> None:
    with closing(sqlite3.connect(server.folder / "server.db")) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {table: database.execute(f'SELECT * FROM "{table}"').fetchall() for table in tables}
    assert rows["metrics"]
    assert rows["params"]
    for table, content in rows.items():
        assert_no_secret(repr(content).encode(), f"table {table}")
    files = [path for path in server.folder.joinpath("artifacts").rglob("*") if path.is_file()]
    assert "config.yaml" in {path.name for path in files}
    for path in files:
        assert_no_secret(path.read_bytes(), str(path))
