"""Costs of a step beside the model: data, padding, logging, checkpoints, the memory of the loss. For step.py.

One real run of `dist-transformer train` on text in an invented language, with its loader process, its log, MLflow in
sqlite and checkpoints, in a process of its own. Figures are those of the run's metrics.jsonl, and of clocks
(timed_train.py) for the others. Two of them are bounds: training is assumed to wait for each window in full, though the
loader process has built it long before; and CPU-seconds of background threads are assumed to hold up training, as they
do on a machine without a free core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from memory_plan import all_events
from synthetic_corpus import PAD_ID, synthetic_config
from synthetic_text import trained_tokenizer, write_text
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from dist_transformer.config.loading import to_yaml
from dist_transformer.config.schema import Config, ModelConfig
from dist_transformer.data.manifest import Manifest
from dist_transformer.model.loss import label_smoothed_cross_entropy
from dist_transformer.run.metrics_log import read_records
from dist_transformer.training.run_data import RunData

PREPARED, CONFIG = "prepared", "run.yaml"
LOG_EVERY_STEPS = 10
CHECKPOINT_EVERY_STEPS = 20
SAVE_SECONDS = 600.0
"""Time between two checkpoints, for their budget."""
BYTES_OF_FP32 = 4


@dataclass(frozen=True)
class Row:
    """A line of the report; `figure` and `budget` are shares, or numbers in the format `unit`."""

    what: str
    figure: float
    budget: float
    note: str
    unit: str = "{:.2%}"

    @property
    def verdict(self) -> str:
        return "kept" if self.figure < self.budget else "missed"

    def cells(self) -> list[str]:
        figure, budget = (self.unit.format(value) for value in (self.figure, self.budget))
        return [self.what, figure, f"under {budget}", self.verdict, self.note]


@dataclass(frozen=True)
class RealRun:
    """A completed run: its "train" records, its clocks at the same log lines, its data."""

    records: list[dict[str, Any]]
    clocks: list[dict[str, float]]
    data: RunData

    @property
    def seconds(self) -> float:
        """Time of training, without checkpoints."""
        return sum(record["target_tokens"] / record["tokens_per_second"] for record in self.records)

    @property
    def target_tokens(self) -> int:
        return sum(int(record["target_tokens"]) for record in self.records)

    def share_of_seconds(self, name: str) -> float:
        """Returns the mean of a record's value, weighted by the seconds of each record."""
        weights = [record["target_tokens"] / record["tokens_per_second"] for record in self.records]
        return sum(w * record[name] for w, record in zip(weights, self.records, strict=True)) / self.seconds


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Measures all rows; the run is made in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        run = _train(Path(name), arguments)
        rows = [
            _data_wait(run),
            _padding(run),
            _logging(run),
            _checkpoints(run),
            _start(Path(name), arguments.threads),
        ]
    return [*rows, _loss_memory(arguments)]


def description(arguments: argparse.Namespace) -> str:
    return (
        f"One run of `dist-transformer train`: `{arguments.preset}`, vocabulary {arguments.vocabulary:,}, fp32, "
        f"one rank, threads: {arguments.threads}; {arguments.run_steps} steps of one micro-batch of at most "
        f"{arguments.max_tokens:,} tokens, one loader process"
    )


def table(rows: Sequence[Row]) -> str:
    header = ["what", "measured", "budget", "verdict", "how"]
    lines = common.markdown_table(header, [row.cells() for row in rows]).splitlines()
    return "\n".join([lines[0], "| --- | ---: | ---: | --- | --- |", *lines[2:]])


def _train(folder: Path, arguments: argparse.Namespace) -> RealRun:
    write_text(folder, arguments.run_pairs, 4096)
    config = _config(folder, arguments)
    (folder / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    records, clocks = _run(folder, config.run.name, arguments.threads)
    manifest = Manifest.load(folder / PREPARED)
    return RealRun(records, clocks, RunData(config, folder / PREPARED, manifest))


def _run(folder: Path, name: str, threads: int, *settings: str) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Runs the folder's configuration. Returns its "train" records and clocks."""
    clocks, script = folder / "clocks.json", Path(__file__).with_name("timed_train.py")
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        [sys.executable, str(script), str(clocks), str(folder / CONFIG), f"run.name={name}", *settings],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [r for r in read_records(folder / "runs" / name / "metrics.jsonl") if r["event"] == "train"]
    return records, json.loads(clocks.read_text(encoding="utf-8"))


def _config(folder: Path, arguments: argparse.Namespace) -> Config:
    data = {"prepared": str(folder / PREPARED), "lanes": 1, "max_tokens": arguments.max_tokens}
    values = synthetic_config(folder, data, trained_tokenizer(folder, arguments.vocabulary)).model_dump(mode="json")
    values["model"] = {"preset": arguments.preset}
    values["training"] = {
        "precision": "fp32",
        "max_steps": arguments.run_steps,
        "log_every_steps": LOG_EVERY_STEPS,
    }
    values["optimizer"], values["schedule"] = {"learning_rate": 1e-4}, {"warmup_steps": arguments.run_steps}
    values["checkpoints"] = {"every_steps": CHECKPOINT_EVERY_STEPS}
    return Config.model_validate(values)


def _data_wait(run: RealRun) -> Row:
    """Measures the wait within a window, and the time to build a window if it were not built ahead."""
    data = run.data.config.data
    began = time.perf_counter()
    run.data.loader(run.data.start(), 0, 0, 1, 0).next_step()
    build_seconds = time.perf_counter() - began
    split = run.data.manifest.splits["train"]
    tokens_of_window = min(split.rows, data.window_rows) * split.target_tokens / split.rows
    in_windows = run.share_of_seconds("data_wait_share")
    between = build_seconds * run.target_tokens / run.seconds / tokens_of_window
    note = (
        f"data_wait_share in metrics.jsonl {in_windows:.3%}; and {between:.3%} if each window of {data.window_rows:,} rows were "
        f"made ({build_seconds:.2f} s) while training waits"
    )
    return Row("waiting for data, of a step", in_windows + between, 0.01, note)


def _padding(run: RealRun) -> Row:
    """Measures padding of the run's own batches."""
    note = f"padding_share in metrics.jsonl, windows of {run.data.config.data.window_rows:,} rows"
    return Row("padding, of the tokens", run.share_of_seconds("padding_share"), 0.07, note)


def _logging(run: RealRun) -> Row:
    """Measures from the first log line after MLflow's run was made to the last one."""
    samples = [sample for sample in run.clocks if sample["tracked"]]
    assert len(samples) > 1, "the run ended before its MLflow run was made: give it more steps (--run-steps)"
    wall, held, followers = (samples[-1][name] - samples[0][name] for name in ("wall", "logging", "followers"))
    note = (
        f"a line each {LOG_EVERY_STEPS} steps: {held / wall:.3%} in the training thread, {followers / wall:.3%} CPU of the "
        f"threads that send to MLflow (sqlite) and sample the machine; over {len(samples) - 1} lines"
    )
    return Row("tracking and logging, of the time", (held + followers) / wall, 0.01, note)


def _checkpoints(run: RealRun) -> Row:
    """Measures saves: training waits twice (copy, commit), and a thread computes checksums in between."""
    saves = (run.records[-1]["step"] - 1) // CHECKPOINT_EVERY_STEPS
    still = sum(record["save_seconds"] for record in run.records) / saves
    last = run.clocks[-1]
    writing = last["writing"] / last["writing, times"]
    note = (
        f"{still:.2f} s stands still for each (save_seconds), {writing:.2f} s CPU of the writing thread; {saves} saves"
    )
    return Row("checkpoints, one in 10 minutes", (still + writing) / SAVE_SECONDS, 0.02, note)


def _start(folder: Path, threads: int) -> Row:
    """Measures the start of another run on the corpus that the first one has prepared; its only step included."""
    began = time.time()
    (record,), _ = _run(folder, "start", threads, "training.max_steps=1", "schedule.warmup_steps=1")
    note = "from the command to the log line of its first step; the corpus is prepared"
    return Row("start to the first step", record["time"] - began, 15.0, note, "{:.1f} s")


def _loss_memory(arguments: argparse.Namespace) -> Row:
    """Measures the peak of loss and backward pass, with gradients; its budget is one tensor of all logits in fp32."""
    d_model, vocabulary, tokens = (
        ModelConfig(preset=arguments.preset).d_model,
        arguments.vocabulary,
        arguments.loss_tokens,
    )
    random = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(tokens, d_model, generator=random).requires_grad_()
    weight_VD = torch.randn(vocabulary, d_model, generator=random).requires_grad_()
    target_N = torch.randint(PAD_ID + 1, vocabulary, (tokens,), generator=random)

    def chunked() -> None:
        label_smoothed_cross_entropy(hidden_ND, weight_VD, target_N, 0.1, PAD_ID)[0].backward()

    def whole() -> None:
        logits_NV = hidden_ND @ weight_VD.T
        torch.nn.functional.cross_entropy(logits_NV, target_N, label_smoothing=0.1, reduction="sum").backward()

    (peak, largest), (plain_peak, _) = allocated(chunked), allocated(whole)
    logits = tokens * vocabulary * BYTES_OF_FP32
    note = (
        f"peak of forward and backward, gradients included, against all logits of {tokens:,} target tokens x {vocabulary:,} "
        f"pieces in fp32; the largest tensor {largest / 1e6:,.1f} MB; peak of F.cross_entropy {plain_peak / 1e6:,.1f} MB"
    )
    return Row("memory of the loss", peak / 1e6, logits / 1e6, note, "{:,.1f} MB")


def allocated(work: Callable[[], None]) -> tuple[int, int]:
    """Returns the bytes that `work` allocates in tensors on the CPU: the peak, and the largest single tensor."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        work()
    in_use = peak = largest = 0
    for event in sorted(all_events(recorded), key=lambda event: event.start_time_ns):
        if event.tag == _EventType.Allocation:
            in_use += event.extra_fields.alloc_size
            peak, largest = max(peak, in_use), max(largest, event.extra_fields.alloc_size)
    return peak, largest
