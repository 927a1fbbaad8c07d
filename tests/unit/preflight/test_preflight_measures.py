"""What ranks measure: the plan of the exchanges, the disk, and what is found out about MLflow."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dist_transformer.cli.preflight import tracking_warnings
from dist_transformer.preflight import node_benchmarks
from dist_transformer.preflight.network_benchmarks import partners, ring_rounds


@pytest.mark.parametrize("num_nodes", range(1, 12))
def test_every_node_exchanges_with_both_neighbours_and_with_one_at_a_time(num_nodes):
    rounds = ring_rounds(num_nodes)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    met = {frozenset(pair) for pairs in rounds for pair in pairs}
    ring = {frozenset((node, (node + 1) % num_nodes)) for node in range(num_nodes)} if num_nodes > 1 else set()
    assert met == ring
    assert sum(map(len, rounds)) == len(ring)


def test_ranks_exchange_with_the_same_number_on_the_other_node_and_agree_on_it():
    nodes = [[0, 1, 2], [3, 4], [5, 6, 7]]
    for pairs in ring_rounds(3):
        held = [(nodes[a], nodes[b]) for a, b in pairs]
        for rank in range(8):
            for other in partners(rank, held):
                assert partners(other, held) == [rank]
    assert partners(1, [(nodes[0], nodes[1])]) == [4]
    assert partners(2, [(nodes[0], nodes[1])]) == []


def test_the_disk_is_measured_with_a_file_that_does_not_stay(tmp_path):
    measures, warnings = node_benchmarks.disk(tmp_path)
    assert min(measures.values()) > 0.0
    assert list(tmp_path.iterdir()) == []
    assert all("GB are free" in text for text in warnings)


def test_a_disk_that_cannot_be_written_has_the_speed_0_and_is_named(tmp_path):
    measures, warnings = node_benchmarks.disk(tmp_path / "gone")
    assert measures == {"disk_write_mb_per_second": 0.0}
    assert str(tmp_path / "gone") in warnings[0]


def test_little_free_space_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(node_benchmarks, "LOW_SPACE_GB", 1e9)
    _, warnings = node_benchmarks.disk(tmp_path)
    assert len(warnings) == 2
    assert f"GB are free in {tmp_path}" in warnings[0]


@pytest.fixture
def server():
    """Answers each path with the code in `codes`, 200 where there is none."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.codes.get(self.path.split("?")[0], 200))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as running:
        running.codes = {}
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


API = "/api/2.0/mlflow/experiments/get-by-name"


@pytest.mark.parametrize(("code", "is_fine"), [(200, True), (401, True), (404, True), (403, False), (500, False)])
def test_mlflow_is_there_when_its_api_answers(server, tmp_path, monkeypatch, code, is_fine):
    server.codes = {API: code}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}/")
    warnings = tracking_warnings(tmp_path)
    assert warnings == (
        [] if is_fine else [f"MLflow at http://127.0.0.1:{server.server_port}/ answers with the error {code}"]
    )


def test_an_mlflow_server_that_is_away_is_a_warning_without_its_password(server, tmp_path, monkeypatch):
    port = server.server_port
    server.server_close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:hidden@127.0.0.1:{port}")
    (warning,) = tracking_warnings(tmp_path)
    assert warning.startswith(f"MLflow at http://127.0.0.1:{port} does not answer: ")
    assert "hidden" not in warning


def test_a_run_without_a_server_is_not_asked_about(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert tracking_warnings(tmp_path) == []
