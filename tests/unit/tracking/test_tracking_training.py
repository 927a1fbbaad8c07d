"""Real runs of `dist-transformer train` whose server comes late, dies, and confirms what it took to nobody."""

import os
import signal
from collections.abc import Iterator
from subprocess import Popen

import pytest
from faulty_proxy import Fault, Proxy
from mlflow import MlflowClient
from mlflow_server import Server, wait_until
from running import Command, wait_for_step, with_constants
from tracking_helpers import assert_complete, curves_in_file, curves_on_server, run_id_of, sent_step

from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records

pytestmark = pytest.mark.slow

OFTEN = ("checkpoints.every_steps=40", "checkpoints.keep_last=2", "validation.every_steps=60")


def tracking(uri: str) -> str:
    return f"tracking={{enabled: true, uri: '{uri}'}}"


@pytest.fixture
def processes() -> Iterator[list["Popen[str]"]]:
    """Those that a test left running when it failed are killed."""
    started: list[Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            kill(process)


def kill(process: "Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def newest_step(run_dir: RunDir) -> int:
    return max(record["step"] for record in read_records(run_dir.metrics) if record["event"] == "train")


def test_a_server_started_only_after_training_ended_gets_the_whole_run(command: Command, sqlite_server: Server) -> None:
    settings = (tracking(sqlite_server.uri), "validation.every_steps=2", "run.name=late_server")
    said = command("train", "small.yaml", *settings, **with_constants({"tracking.tracker.CLOSE_SECONDS": 1}))
    run_dir = RunDir(command.folder / "runs" / "late_server")
    assert f"track sync {run_dir.path}" in said
    sqlite_server.start()
    command("track", "sync", run_dir.path)
    assert_complete(sqlite_server.uri, run_dir)
    assert {"train/loss", "train/learning_rate", "validation/loss"} <= curves_in_file(run_dir).keys()
    assert MlflowClient(tracking_uri=sqlite_server.uri).get_run(run_id_of(run_dir)).info.status == "FINISHED"
    sqlite_server.kill()


def test_a_run_killed_and_set_back_while_its_server_comes_and_goes_has_every_step_once(
    command: Command, sqlite_server: Server, processes: list["Popen[str]"]
) -> None:
    server, run_dir = sqlite_server, RunDir(command.folder / "runs" / "faulty_server")

    def start(uri: str) -> "Popen[str]":
        settings = (tracking(uri), "run.name=faulty_server", "training.max_steps=1000000", *OFTEN)
        patient = with_constants({"tracking.tracker.CLOSE_SECONDS": 60})
        processes.append(command.start("train", "small.yaml", *settings, **patient))
        return processes[-1]

    server.stop()  # also where the test before has failed
    with Proxy(server.port) as proxy:
        first = start(proxy.uri)  # the server is away in the first start and when the second begins
        wait_for_step(run_dir.path, 60)
        kill(first)
        second = start(proxy.uri)
        wait_for_step(run_dir.path, newest_step(run_dir) + 1)
        server.start()
        wait_until(lambda: sent_step(run_dir) > 60)
        proxy.set_fault(Fault(only="runs/log-batch", is_cut=True))  # stored, and tracking.json never learns it
        wait_until(lambda: proxy.met > 0)
        kill(second)
        proxy.set_fault(None)
        last = start(proxy.uri)
        seen = newest_step(run_dir)
        wait_until(lambda: sent_step(run_dir) > seen)
        server.kill()
        wait_for_step(run_dir.path, newest_step(run_dir) + 20)
        server.start()
        run_dir.stop_file.touch()
        out, err = last.communicate(timeout=300)
        assert last.returncode == 75, out + err
        command("track", "sync", run_dir.path)
    assert_every_step_once(server.uri, run_dir)


def assert_every_step_once(uri: str, run_dir: RunDir) -> None:
    """What training did twice is on the server as it was the first time: losses are equal, clocks and speeds are not."""
    stored, written = curves_on_server(uri, run_id_of(run_dir)), curves_in_file(run_dir)
    assert stored.keys() == written.keys()
    for key, curve in stored.items():
        steps = [step for step, _, _ in curve]
        if key.startswith("system/"):  # measured by the clock: at other steps where training goes over them again
            assert steps == sorted(set(steps))
        else:
            assert steps == [step for step, _, _ in written[key]]
    for key in ("train/loss", "train/learning_rate", "validation/loss"):
        assert [value for _, value, _ in stored[key]] == [value for _, value, _ in written[key]]
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_run(run_id_of(run_dir)).info.experiment_id
    names = [run.info.run_name for run in client.search_runs([experiment])]
    assert names.count("faulty_server") == 1
