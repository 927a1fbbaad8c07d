"""Cost of following a run in MLflow for training: with a healthy server, a slow one, a frozen one and none at all.

    python benchmarks/tracking.py

A step is a load like training, matrix products of about 20 ms in the main thread, and then the logging of its 12
values. Cases take turns in blocks of steps: the values only appended to metrics.jsonl (*off*), and appended while a
tracker follows the run (*on*). The training thread is held up by the time in the call itself; the other costs of the
background thread (Python runs one thread at a time) show in the time of whole steps, on against off, on a quiet
machine; on a busy one the CPU seconds of the process, all threads, bound them.

Beside it `mlflow.log_metrics` is called by the same loop with MLflow's default settings, in a process of its own that
is killed if a situation takes too long: MLflow retries for minutes before it gives up and raises.
"""

import argparse
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import Figures

from dist_transformer.config.schema import TrackingConfig, TrainingConfig
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog
from dist_transformer.tracking import tracker as tracking
from dist_transformer.tracking.tracker import Tracker

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from faulty_proxy import Fault, Proxy
from mlflow_server import Server, free_port

tracking.CLOSE_SECONDS = 1

HEALTHY, SLOW, FROZEN, DEAD = SITUATIONS = ("healthy", "slow", "frozen", "dead")
ON, OFF, DIRECT = "ours", "metrics.jsonl only", "mlflow.log_metrics"
NUM_VALUES = 12
MATRIX = 512
BUDGET = 0.01
"""Maximum share of the time of a step (promise P6)."""
OUR_SETTINGS = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
RELAY, CALLER = "--as-relay", "--as-caller"


class Load:
    """Matrix products in the calling thread that take about `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.randn(MATRIX, MATRIX, generator=torch.Generator().manual_seed(1)) / MATRIX**0.5
        self.num_products = 10
        self.work()
        taken = min(self._timed() for _ in range(5))
        self.num_products = max(1, round(self.num_products * seconds / taken))

    def work(self) -> None:
        for _ in range(self.num_products):
            torch.mm(self._matrix, self._matrix)

    def _timed(self) -> float:
        began = time.perf_counter()
        self.work()
        return time.perf_counter() - began


class Relay:
    """Relay from the measured process to the server, a process of its own that can be slow, freeze and die alone."""

    def __init__(self, server_port: int, seconds: float) -> None:
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._command = [sys.executable, __file__, RELAY, str(server_port), str(self._port), str(seconds)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Situation:
    """An address, and functions that begin and end a trouble of its server while it is in use."""

    uri: str
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


def main() -> None:
    if sys.argv[1:2] == [RELAY]:
        _relay(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    elif sys.argv[1:2] == [CALLER]:
        _call_mlflow(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        _measure(_arguments())


def _measure(arguments: argparse.Namespace) -> None:
    found = common.begin(arguments.threads)
    folder = Path(tempfile.mkdtemp())
    server = Server(folder, f"sqlite:///{folder}/server.db")
    try:
        server.start()
        figures = {}
        for name in arguments.situations:
            with _situation(name, server, arguments.slow_seconds) as situation:
                figures[name] = {**_ours(situation, folder, arguments), DIRECT: _direct(situation, arguments)}
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(_description(arguments, figures) + "\n\n" + _table(figures))
    common.finish(arguments, found, figures)


@contextmanager
def _situation(name: str, server: Server, slow_seconds: float) -> Iterator[Situation]:
    if name == HEALTHY:
        yield Situation(server.uri)
        return
    relay = Relay(server.port, slow_seconds if name == SLOW else 0.0)
    changes = {FROZEN: (relay.freeze, relay.thaw), DEAD: (relay.kill, relay.start)}
    try:
        yield Situation(relay.uri, *changes.get(name, ()))
    finally:
        relay.kill()


def _ours(situation: Situation, folder: Path, arguments: argparse.Namespace) -> dict[str, list[Figures]]:
    load = Load(arguments.load_milliseconds / 1000)
    cases = {case: partial(_block, case, load, situation, folder, arguments.steps) for case in (OFF, ON)}
    return common.interleaved(cases, arguments.rounds)


def _block(case: str, load: Load, situation: Situation, folder: Path, num_steps: int) -> Figures:
    """Measures steps in a new run folder. With a tracker the trouble begins once the server has made the run."""
    run_dir = RunDir(Path(tempfile.mkdtemp(dir=folder)))
    log = MetricsLog(run_dir.metrics)
    if case == OFF:
        return _steps(log, load, num_steps)
    settings = TrackingConfig.model_validate({"uri": situation.uri})
    tracker = Tracker(run_dir, settings, run_dir.name, folder, run_dir.name)
    tracker.start({"seed": "1"}, {}, "model: base\n")
    while not _is_delivered(run_dir):
        time.sleep(0.05)
    situation.begin()
    figures = _steps(log, load, num_steps)
    situation.end()
    tracker.close("FINISHED")
    for thread in threading.enumerate():  # a thread that still waits for an answer must not burden the next case
        if thread.name.startswith("tracking "):
            thread.join()
    return figures


def _is_delivered(run_dir: RunDir) -> bool:
    """True if the server has the run and all data of its start, as after the first seconds of a real one."""
    sent = read_json(run_dir.tracking)["spool_offset"] if run_dir.tracking.exists() else 0
    return bool(sent == run_dir.tracking_events.stat().st_size)


def _steps(log: MetricsLog, load: Load, num_steps: int) -> Figures:
    calls, steps, cpu_began = [], [], time.process_time()
    for step in range(1, num_steps + 1):
        began = time.perf_counter()
        load.work()
        calling = time.perf_counter()
        log.append("train", step, _values(step))
        ended = time.perf_counter()
        calls.append(ended - calling)
        steps.append(ended - began)
    cpu_seconds = (time.process_time() - cpu_began) / num_steps
    log.close()
    return {**_spread(calls), "step_seconds": statistics.mean(steps), "cpu_seconds": cpu_seconds}


def _direct(situation: Situation, arguments: argparse.Namespace) -> Figures:
    """Measures the same loop calling MLflow itself, killed after a time."""
    environment = {name: value for name, value in os.environ.items() if name not in OUR_SETTINGS}
    values = (situation.uri, arguments.load_milliseconds, arguments.direct_steps)
    caller = subprocess.Popen(
        [sys.executable, __file__, CALLER, *map(str, values)], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert caller.stdin is not None
    assert caller.stdout is not None
    assert caller.stdout.readline() == "ready\n"
    situation.begin()
    killer = threading.Timer(arguments.cut_seconds, caller.kill)
    killer.start()
    caller.stdin.write("go\n")
    caller.stdin.flush()
    calls = [float(line) for line in caller.stdout]
    killer.cancel()
    caller.kill()
    caller.wait()
    situation.end()
    return {**(_spread(calls) if calls else {}), "calls": len(calls), "cut_seconds": arguments.cut_seconds}


def _call_mlflow(uri: str, load_milliseconds: float, num_steps: int) -> None:
    """Prints the seconds of each call, a line each, once the run is made and the parent sends "go"; its own process."""
    import mlflow

    torch.set_num_threads(1)
    load = Load(load_milliseconds / 1000)
    mlflow.set_tracking_uri(uri)
    mlflow.log_metrics(_values(0), step=0)
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(1, num_steps + 1):
        load.work()
        began = time.perf_counter()
        mlflow.log_metrics(_values(step), step=step)
        print(time.perf_counter() - began, flush=True)


def _relay(port: int, own_port: int, seconds: float) -> None:
    with Proxy(port, own_port=own_port) as proxy:
        proxy.set_fault(Fault(delay_seconds=seconds))
        print("ready", flush=True)
        threading.Event().wait()


def _values(step: int) -> dict[str, float]:
    return {f"value_{number}": math.sin(step * (number + 1)) for number in range(NUM_VALUES)}


def _spread(seconds: list[float]) -> Figures:
    ordered = sorted(seconds)
    percentile = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return {"median_seconds": statistics.median(ordered), "p99_seconds": percentile, "max_seconds": ordered[-1]}


def _description(arguments: argparse.Namespace, figures: dict[str, dict[str, Any]]) -> str:
    steps = [sample["step_seconds"] for cases in figures.values() for sample in cases[OFF]]
    return (
        f"Steps of {1000 * statistics.median(steps):.1f} ms, {NUM_VALUES} values logged at each of them, not at "
        f"each {TrainingConfig().log_every_steps}th as by default; {arguments.rounds} rounds of "
        f"{arguments.steps} steps a case and situation; microseconds that the training thread is held up in a call, of all "
        f"rounds: the median of the medians, the median of the 99th percentiles, the largest. mlflow.log_metrics: at most "
        f"{arguments.direct_steps} calls, its settings as they are, killed after {arguments.cut_seconds:.0f} s. The slow server "
        f"takes {arguments.slow_seconds:g} s more for each request."
    )


def _table(figures: dict[str, dict[str, Any]]) -> str:
    header = ["server", "off: median", "99 %", "max", "ours: median", "99 %", "max", "CPU of a step, ours to off", "its time",
              "range",
              f"budget {1 + BUDGET}", "mlflow.log_metrics: median", "99 %", "max", "calls"]  # fmt: skip
    rows = []
    for situation, cases in figures.items():
        on, off, direct = cases[ON], cases[OFF], cases[DIRECT]
        ratio = common.median_ratio(on, off, "step_seconds")
        rows.append([
            situation, *_microseconds(off), *_microseconds(on),
            f"{common.median_ratio(on, off, 'cpu_seconds'):.4f}", f"{ratio:.4f}", _range(on, off),
            "kept" if ratio <= 1 + BUDGET else "above", *_direct_cells(direct),
        ])  # fmt: skip
    return common.markdown_table(header, rows)


def _range(on: list[Figures], off: list[Figures]) -> str:
    ratios = [a["step_seconds"] / b["step_seconds"] for a, b in zip(on, off, strict=True)]
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def _microseconds(samples: list[Figures]) -> list[str]:
    figures = [common.median(samples, "median_seconds"), common.median(samples, "p99_seconds")]
    return [f"{1e6 * seconds:,.0f}" for seconds in (*figures, max(sample["max_seconds"] for sample in samples))]


def _direct_cells(direct: Figures) -> list[str]:
    if not direct["calls"]:
        return [f"above {1e6 * direct['cut_seconds']:,.0f}", "", "", "0, cut off"]
    spread = [f"{1e6 * direct[name]:,.0f}" for name in ("median_seconds", "p99_seconds", "max_seconds")]
    return [*spread, f"{direct['calls']:.0f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--situations", nargs="+", choices=SITUATIONS, default=SITUATIONS)
    parser.add_argument("--steps", type=int, default=200, help="of a case in a round")
    parser.add_argument("--direct-steps", type=int, default=60, help="calls of mlflow.log_metrics at most")
    parser.add_argument("--cut-seconds", type=float, default=90, help="of mlflow.log_metrics in one situation")
    parser.add_argument("--load-milliseconds", type=float, default=20, help="of matrix products a step")
    parser.add_argument("--slow-seconds", type=float, default=1.0, help="added to each request to the slow server")
    parser.add_argument("--threads", type=int, default=1)
    return common.arguments_of(parser, rounds=5)


if __name__ == "__main__":
    main()
