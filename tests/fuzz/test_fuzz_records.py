"""Records of a run and the tracker's outbox with anything in them: no whole line is lost, none of our files is sent."""

import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forked_command import bounded, must_end_in_a_message
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mutated_runs import VALUES, changed, copy_of, damaged, write_run

from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.files import read_json, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import add_event, read_records, read_records_from
from dist_transformer.run.tail import last_lines, lines_from
from dist_transformer.tracking.messages import send_event
from dist_transformer.tracking.outbox import CannotBeSent, DeliveryState, load_delivery_state

pytestmark = pytest.mark.slow

SEEDS = st.integers(0, 2**32)
ODD_TEXT = st.text(st.sampled_from('ab\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\0\ufeff"\\{}\ud800'), max_size=6)
JUNK = st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")) | st.sampled_from(
    [b"null", b"[]", b"{}", b'{"event": 5}', b'{"step": 1}', b"[" * 10_000, b'{"event": "a", "step": 1', b"9" * 5000]
)
LINES = st.lists(st.tuples(ODD_TEXT, st.none()) | st.tuples(st.none(), JUNK), max_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@bounded(30)
@given(LINES, JUNK)
def test_no_whole_record_is_lost_between_damaged_lines(folder, lines, torn):
    path = folder / "records.jsonl"
    path.write_bytes(b"")
    written = []
    for number, (text, junk) in enumerate(lines):
        if junk is None:
            add_event(path, "said", {"number": number, "text": text})
            written.append(number)
        else:
            path.write_bytes(path.read_bytes() + junk + b"\n")
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    found = [record for record in read_records(path) if record["event"] == "said"]
    assert [record["number"] for record in found] == written
    ends = [end for _, end in read_records_from(path, 0)]
    for end in ends:  # from each place at which a delivery may have stopped
        assert [e for _, e in read_records_from(path, end)] == [e for e in ends if e > end]
    lines = [line[:-1].decode(errors="replace") for line, _ in lines_from(path, 0)]
    assert lines == [*reversed([*last_lines(path, 10**9)][1:])]
    add_event(path, "said", {"number": -1})
    assert path.read_bytes().startswith(whole), "of a torn line nothing is kept, of others all"
    assert list(read_records(path))[-1]["number"] == -1


@bounded(30)
@given(SEEDS)
def test_a_delivery_state_of_other_values_is_used_or_begun_again(folder, seed):
    path, draw = folder / "tracking.json", random.Random(seed)
    DeliveryState("a run", sent={"train": 2}, ahead={"files": 5}, outbox_offset=7, uri="http://a").save(path)
    if draw.random() < 0.5:
        path.write_text(json.dumps(changed(read_json(path), draw)), encoding="utf-8")
    else:
        path.write_bytes(damaged(path.read_bytes(), draw))
    state = load_delivery_state(path, "a run")
    state.advance("words", state.offset("words") + 1)
    state.is_followed_elsewhere("sqlite:////nowhere/mlflow.db")
    state.save(path)
    assert load_delivery_state(path, "a run") == state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tracked") / "runs"
    write_text(root / "a.yaml", "data: {train: {demo: train}, validation: {demo: validation}}\nmodel: {preset: tiny}\n")
    config = to_yaml(load_config(root / "a.yaml", [f"run.root={root}", "run.name=a"], check_files=False))
    write_run(RunDir(root / "a"), config)
    must_end_in_a_message("track", "sync", str(root / "a"))  # makes the store, which takes seconds
    return root / "a"


@bounded(3)
@given(SEEDS, st.sampled_from(["tracking_events.jsonl", "tracking_events.jsonl", "metrics.jsonl", "tracking.json"]))
def test_what_is_whole_in_a_damaged_outbox_is_delivered(run, seed, name):
    run_dir, draw = RunDir(copy_of(run, run.parent / "b")), random.Random(seed)
    run_dir.tracking.unlink()
    if name != "tracking.json":
        file = run_dir.path / name
        lines = file.read_text(encoding="utf-8").splitlines()
        for place in draw.sample(range(len(lines)), 3):
            lines[place] = json.dumps(changed(json.loads(lines[place]), draw))
        write_text(file, "".join(f"{line}\n" for line in lines))
    else:
        run_dir.tracking.write_text(json.dumps({"run_name": "b", "run_uid": draw.choice(VALUES)}), encoding="utf-8")
    add_event(run_dir.tracking_events, "evaluation", {"step": 6, "name": "last", "metrics": {"bleu": 7.0}})
    add_event(run_dir.tracking_events, "status", {"status": "KILLED"})
    must_end_in_a_message("track", "sync", str(run_dir.path))
    memory = read_json(run_dir.tracking)
    tracked = MlflowClient(tracking_uri=memory["uri"]).get_run(memory["run_id"])
    assert tracked.info.status == "KILLED"
    assert tracked.data.metrics["evaluation/last/bleu"] == 7.0


SECRET = "a private key"


@pytest.fixture
def others_run(tmp_path: Path) -> RunDir:
    """A run folder that somebody else has made, beside a file of ours."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text(SECRET, encoding="utf-8")
    run_dir = RunDir(tmp_path / "run")
    for folder in (run_dir.profile, run_dir.model):
        folder.mkdir(parents=True)
    for file in (run_dir.profile / "profile_rank0.md", run_dir.report):
        file.write_text("of the run", encoding="utf-8")
    for name in ("config.json", "model.safetensors"):
        (run_dir.model / name).write_text("{}", encoding="utf-8")
    return run_dir


def send(run_dir: RunDir, event: str, path: str) -> mock.Mock:
    tracked = mock.Mock()
    details: dict[str, Any] = {"event": event, "time": 1.0, "step": 1, "metrics": {}, "path": path}
    channel = {"profile": "files", "figures": "figures", "model": "model"}[event]
    with mock.patch("dist_transformer.tracking.mlflow_models.log_model", tracked.log_model):
        send_event(tracked, details, channel, run_dir)
    return tracked


def test_what_belongs_to_the_run_is_sent(others_run):
    assert send(others_run, "profile", "profile/profile_rank0.md").log_file.called
    assert send(others_run, "figures", "").log_file.called
    assert send(others_run, "model", "model").log_model.called


@pytest.mark.parametrize("event", ["profile", "model"])
@pytest.mark.parametrize(
    "path", ["../home/key", "../home", "/", "{home}/key", "{home}", "link", "link/key", "model/../.."]
)
def test_no_file_outside_of_the_run_folder_is_sent_to_a_server(others_run, event, path):
    home = others_run.path.parent / "home"
    (others_run.path / "link").symlink_to(home)
    with pytest.raises(CannotBeSent):
        send(others_run, event, path.format(home=home))


def test_no_link_in_a_folder_takes_a_file_outside_of_it_to_a_server(others_run):
    (others_run.model / "extra").symlink_to(others_run.path.parent / "home" / "key")
    with pytest.raises(CannotBeSent, match="leads out of"):
        send(others_run, "model", "model")


def test_no_report_that_is_a_link_takes_a_file_outside_of_the_run_folder_to_a_server(others_run):
    others_run.report.unlink()
    others_run.report.symlink_to(others_run.path.parent / "home" / "key")
    with pytest.raises(CannotBeSent, match="leads out of"):
        send(others_run, "figures", "")


def test_a_model_outside_of_the_run_folder_is_sent_if_it_is_one(others_run):
    shutil.move(others_run.model, others_run.path.parent / "elsewhere")
    assert send(others_run, "model", str(others_run.path.parent / "elsewhere")).log_model.called
