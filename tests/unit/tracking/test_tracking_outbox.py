import itertools
import math
import os
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_metric_name

from dist_transformer.config.credentials import without_credentials, without_secrets
from dist_transformer.files import write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import add_event, read_records
from dist_transformer.tracking.final_status import has_arrived
from dist_transformer.tracking.messages import folder_digest, points_of
from dist_transformer.tracking.mlflow_client import explanation, translated_errors, valid_key
from dist_transformer.tracking.outbox import DeliveryState, ServerRefused, ServerTrouble, load_delivery_state
from dist_transformer.tracking.tracker import delivery_state_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:secret@host:5000/path", "http://host:5000/path"),
        ("uri: 'https://user:se@cret@host'\nnext: a@b", "uri: 'https://host'\nnext: a@b"),
        ("postgresql+psycopg2://u:secret@db/x?password=secret&a=1", "postgresql+psycopg2://db/x?password=***&a=1"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host:5000/a@b", "https://host:5000/a@b"),
        ("mysql+pymysql://u:se/cret@db/x", "mysql+pymysql://db/x"),
        (
            "https://b.s3/k?X-Amz-Date=20261122&X-Amz-Credential=id%2Fx&X-Amz-Security-Token=to&X-Amz-Signature=si",
            "https://b.s3/k?X-Amz-Date=20261122&X-Amz-Credential=***&X-Amz-Security-Token=***&X-Amz-Signature=***",
        ),
        ("https://storage/k?X-Goog-Signature=si&alt=json", "https://storage/k?X-Goog-Signature=***&alt=json"),
        ("https://a.blob/k?sv=2024&sig=ab%3D for url", "https://a.blob/k?sv=2024&sig=*** for url"),
        ("https://host/x?signal=1&design=2", "https://host/x?signal=1&design=2"),
    ],
)
def test_credentials_are_removed_from_addresses_and_nothing_else_is(text: str, expected: str) -> None:
    assert without_credentials(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user of http://u:of-the-address@host, of-the-address", "user of http://host, ***"),
        ("your token is tok/en+47=.", "your token is ***."),
        ("sent: Authorization: Basic dXNlcjpwYXNz, Bearer abc.def-ghi", "sent: Authorization: Basic ***, Bearer ***"),
        ("The basics, 12345 steps, MLFLOW_TRACKING_TOKEN", "The basics, 12345 steps, MLFLOW_TRACKING_TOKEN"),
    ],
)
def test_what_a_server_says_is_cleared_of_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://u:of-the-address@host")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "tok/en+47=")
    monkeypatch.setenv("SOME_PASSWORD", "12345")
    assert without_secrets(text) == expected


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        ("failed with error code 401 != 200. Response body: ''", "MLFLOW_TRACKING_USERNAME"),
        ("PERMISSION_DENIED: no", "MLFLOW_TRACKING_TOKEN"),
        ("HTTPError: 403 Client Error: Forbidden for url", "MLFLOW_TRACKING_PASSWORD"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "MLFLOW_TRACKING_SERVER_CERT_PATH"),
        ("too many 503 error responses", "disk is full"),
        ("ModuleNotFoundError: No module named 'psycopg'", "install it in the environment that trains"),
        ("(sqlite3.OperationalError) database is locked", "A server for a team"),
        ("OperationalError: attempt to write a readonly database", "track sync"),
        ("failed with error code 403 != 200. Response body: 'Invalid Host header'", "--allowed-hosts"),
    ],
)
def test_an_answer_with_a_known_cause_comes_with_its_remedy(answer: str, remedy: str) -> None:
    assert explanation(answer).startswith(f"{answer} (")
    assert remedy in explanation(answer)


def test_the_memory_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    memory = DeliveryState("a run", mlflow_run_id="abc", sent={"train": 5}, outbox_offset=17, ahead={"words": 4})
    memory.save(tmp_path / "tracking.json")
    assert load_delivery_state(tmp_path / "tracking.json", "another name") == memory


def test_an_event_is_not_glued_to_a_torn_one(tmp_path: Path) -> None:
    spool = tmp_path / "events.jsonl"
    add_event(spool, "status", {"status": "FAILED"})
    spool.write_bytes(spool.read_bytes() * 2 + b'{"event": "sta')
    add_event(spool, "status", {"status": "FINISHED"})
    assert [event["status"] for event in read_records(spool)] == ["FAILED", "FAILED", "FINISHED"]


def test_a_path_that_is_no_utf_8_can_be_spooled(tmp_path: Path) -> None:
    add_event(tmp_path / "events.jsonl", "start", {"tags": {"command": os.fsdecode(b"train k\xe4se.yaml")}})
    assert [event["tags"] for event in read_records(tmp_path / "events.jsonl")] == [{"command": "train k?se.yaml"}]


def test_numbers_become_points_and_texts_do_not() -> None:
    record = {"event": "train", "step": 5, "time": 12.5, "loss": 2.0, "tokens": 7, "batch_digest": "ab"}
    points = [(point.key, point.value, point.step, point.time_ms) for point in points_of(record)]
    assert points == [("train/loss", 2.0, 5, 12500), ("train/tokens", 7.0, 5, 12500)]


def test_a_digest_changes_with_every_name_and_every_content(tmp_path: Path) -> None:
    digests = set()
    for name, content in [("a", "x"), ("b", "x"), ("a", "y"), ("sub/a", "x")]:
        folder = tmp_path / str(len(digests))
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
        digests.add(folder_digest(folder))
        assert folder_digest(folder) in digests
    assert len(digests) == 4


def test_a_model_folder_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ServerRefused, match=r"model is not there any more"):
        folder_digest(tmp_path / "model")


def test_where_no_server_answers_that_is_all_that_is_said() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens, and nobody else can
        port = closed.getsockname()[1]
        with pytest.raises(ServerTrouble) as caught, translated_errors():
            MlflowClient(tracking_uri=f"http://127.0.0.1:{port}").get_run("0")
    assert str(caught.value) == f"no server answers at 127.0.0.1:{port} (connection refused)"


def test_a_refused_host_name_is_answered_with_its_remedy() -> None:
    answer = explanation("API request to http://u:secret@login01:5000/api failed: 403 'Invalid Host header'")
    assert "--allowed-hosts" in answer
    assert "secret" not in answer


def test_keys_are_made_of_what_mlflow_takes() -> None:
    assert valid_key("train/loss:(nll) per token") == "train/loss:_nll_ per token"


UNUSABLE = ["", '{"run_name": "a", "sen', "[]", "null", '{"run_name": "a", "of_a_newer_version": 1}',
            '{"run_name": "a", "sent": {"train": "many"}}', '{"run_name": "a", "spool_offset": -1}', "[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("text", UNUSABLE, ids=lambda text: text[:50])
def test_a_memory_that_cannot_be_used_is_a_warning_and_delivery_begins_again(
    run_dir: RunDir, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_text(run_dir.tracking, text)
    memory = delivery_state_of(run_dir, "a run", "the-id-in-its-checkpoints")
    assert memory == DeliveryState("a run", "the-id-in-its-checkpoints", created=memory.created)
    assert str(run_dir.tracking) in caplog.text
    assert "begins again" in caplog.text


def test_what_a_spool_that_was_replaced_by_a_shorter_one_holds_is_sent(run_dir: RunDir) -> None:
    add_event(run_dir.tracking_events, "status", {"status": "FAILED"})
    DeliveryState("a run", outbox_offset=1000, ahead={"words": 5}).save(run_dir.tracking)
    assert not has_arrived(run_dir)
    assert delivery_state_of(run_dir, "a run", None).offset("words") == 0


def test_keys_are_made_that_are_no_other_paths() -> None:
    """MLflow's own rule is the reference; a key that it takes stays as it is."""
    parts = ["a", "..", ".", "", ".a", "a.", "...", "ä b:c", "\t", "x" * 249, "-"]
    for key in ["/".join(parts) for parts in itertools.product(parts, repeat=3)] + parts:
        _validate_metric_name(valid_key(key))
    assert valid_key("validation/.dev/bleu") == "validation/.dev/bleu"


@pytest.mark.parametrize("value", [10**400, "10", None, [1], math.nan], ids=lambda value: str(value)[:5])
def test_what_no_server_can_take_becomes_no_point(value: object) -> None:
    record = {"event": "train", "step": 5, "time": 12.5, "loss": value, "bleu": 3}
    assert [(point.key, point.value) for point in points_of(record)] == [("train/bleu", 3.0)]
