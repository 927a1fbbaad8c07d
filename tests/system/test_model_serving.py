"""A trained model in MLflow: loaded in a process of its own, and served over HTTP, it says what `translate` says."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_server import wait_until
from running import NOT_INHERITED, Command, free_port, with_constants, without

pytestmark = pytest.mark.slow

LINES = ["It is nine o'clock.", "", "twenty-one", "   ", "twenty-one " * 30, "The old man sees the house."]
BEAM = 3
LOAD = """
import json, sys
import mlflow.pyfunc
answers = mlflow.pyfunc.load_model(sys.argv[1]).predict(json.loads(sys.argv[2]))
import dist_transformer
print(json.dumps([answers, dist_transformer.__file__]))
"""


@pytest.fixture(scope="module")
def trained(train_small) -> Path:
    """Tracked in the default store; its model is registered."""
    names = ("tracking.register_as=translator", "tracking.alias=champion", "tracking.experiment=serving")
    steps = ("training.max_steps=80", "checkpoints.every_steps=40")  # enough for words
    return train_small(
        "served",
        "tracking.enabled=true",
        f"decoding.beam_size={BEAM}",
        *names,
        *steps,
        **with_constants({"tracking.tracker.CLOSE_SECONDS": 120}),
    )


@pytest.fixture(scope="module")
def environment(trained: Path) -> dict[str, str]:
    """Of somebody who has the store, and looks for programs where this Python is."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    store = f"sqlite:///{trained.parent}/mlflow.db"
    return {**without(NOT_INHERITED), "PATH": path, "MLFLOW_TRACKING_URI": store}


@pytest.fixture(scope="module")
def client(trained: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{trained.parent}/mlflow.db")


def translations(command: Command, model: Path) -> list[str]:
    return command("translate", model, text="".join(f"{line}\n" for line in LINES)).split("\n")[:-1]


@contextmanager
def served(uri: str, environment: dict[str, str], folder: Path) -> Iterator[str]:
    """`mlflow models serve` on a free port; gives its address, and ends all of its processes."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    arguments = ["models", "serve", "-m", uri, "--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *arguments],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers_at(address, process, folder / "serve.log"))
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers_at(address: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text(encoding="utf-8")
    try:
        with urllib.request.urlopen(f"{address}/ping", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(address: str, body: bytes, kind: str = "application/json") -> list[str]:
    request = urllib.request.Request(f"{address}/invocations", body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=600) as answer:
        predictions: list[str] = json.load(answer)["predictions"]
    return predictions


def test_a_registered_model_loaded_elsewhere_translates_as_the_command_does(
    command: Command, trained: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, "models:/translator@champion", json.dumps(LINES)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers, code = json.loads(done.stdout.splitlines()[-1])
    assert answers == translations(command, trained)
    assert any(answers)
    assert answers[1] == answers[3] == ""
    assert not Path(code).is_relative_to(Path(__file__).parents[2]), "it is the code that was uploaded"


def test_a_registered_model_is_served_and_answers_every_form_of_question(
    command: Command, trained: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    expected = translations(command, trained)
    rows = [[line] for line in LINES]
    questions = [
        {"inputs": LINES},
        {"instances": LINES},
        {"dataframe_split": {"columns": ["text"], "data": rows}},
        {"dataframe_records": [{"text": line} for line in LINES]},
    ]
    with served("models:/translator@champion", environment, tmp_path) as address:
        for question in questions:
            assert ask(address, json.dumps(question).encode()) == expected, question.keys()
        table = "text\n" + "".join(f'"{line}"\n' for line in LINES)
        assert ask(address, table.encode(), "text/csv") == expected
        assert ask(address, json.dumps({"inputs": [""]}).encode()) == [""]
        with ThreadPoolExecutor(max_workers=4) as users:
            asked_at_once = users.map(lambda line: ask(address, json.dumps({"inputs": [line]}).encode()), LINES * 3)
            assert list(asked_at_once) == [[answer] for answer in expected * 3]


def test_an_averaged_model_that_the_verb_brought_is_served_with_the_settings_of_the_run(
    command: Command, trained: Path, environment: dict[str, str], client: MlflowClient, tmp_path: Path
) -> None:
    newest = tmp_path / "newest"
    command("average", trained, "--last", 1, "--output", newest)
    said = command("track", "model", trained, newest, "--register-as", "translator", "--alias", "newest")
    version = client.get_model_version_by_alias("translator", "newest")
    assert f"MLflow run {version.run_id}: {newest} is there, registered as translator@newest" in said
    assert str(client.get_model_version_by_alias("translator", "champion").version) != str(version.version)
    experiment = client.get_run(version.run_id).info.experiment_id
    (model,) = client.search_logged_models([experiment], filter_string="name = 'newest'")
    with served(model.model_uri, environment, tmp_path) as address:
        answers = ask(address, json.dumps({"inputs": LINES}).encode())
    text = "".join(f"{line}\n" for line in LINES)
    assert answers == command("translate", newest, "--beam", BEAM, text=text).split("\n")[:-1]


def test_the_verb_says_what_is_wrong(command: Command, trained: Path, tmp_path: Path) -> None:
    assert "give --register-as too" in command("track", "model", trained, "--alias", "champion", code=2)
    assert "holds no model" in command("track", "model", trained, tmp_path, code=2)
    assert "expected a name without / :" in command("track", "model", trained, "--register-as", "a/b", code=2)


def test_sync_says_in_one_line_what_it_sent(command: Command, trained: Path, client: MlflowClient) -> None:
    run_id = client.get_model_version_by_alias("translator", "champion").run_id
    assert command("track", "sync", trained).strip() == f"MLflow run {run_id}: nothing was missing"
    memory = json.loads((trained / "tracking.json").read_text(encoding="utf-8"))
    (trained / "tracking.json").write_text(json.dumps(memory | {"spool_offset": 0}), encoding="utf-8")
    lines = (trained / "tracking_events.jsonl").read_text(encoding="utf-8").count("\n")
    assert command("track", "sync", trained).strip() == f"MLflow run {run_id}: 0 points and {lines} events sent"
