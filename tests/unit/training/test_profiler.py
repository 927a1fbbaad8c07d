"""What a profile of a real engine's steps has, and what it leaves behind."""

import gzip
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_torch import MicroBatch

from dist_transformer.distributed.group import Ranks
from dist_transformer.model import transformer
from dist_transformer.training import profiler as profiler_module
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.profiler import PLAIN_STEPS, PREFIX, PROFILED_STEPS, WARM_UP_STEPS, profiling

BEFORE = WARM_UP_STEPS + PLAIN_STEPS + 1
ALL_STEPS = BEFORE + PROFILED_STEPS


class Run:
    """The loop of training in small, over a real engine."""

    def __init__(self, engine: Engine, micro_batch: MicroBatch) -> None:
        self.engine, self.micro_batch, self.waits = engine, micro_batch, 0
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.batches = SimpleNamespace(next=self.next_batch, prefetch=nothing)
        self.excluded: list[float] = []
        self.metrics = SimpleNamespace(count=nothing, log=nothing, audit=nothing, exclude=self.excluded.append)
        self.bar = SimpleNamespace(show=nothing)

    def profiling(self, ranks: Any, folder: Path, written: list[Path]) -> Any:
        run: Any = SimpleNamespace(
            ranks=ranks,
            run_dir=SimpleNamespace(profile=folder),
            training=SimpleNamespace(precision="fp32"),
            watchdog=SimpleNamespace(progress=lambda _: None),
        )
        parts: Any = (self.engine, self.batches, self.metrics)
        return profiling(run, *parts, [(self.bar, "show", "tracking")], written.append)

    def next_batch(self) -> Any:
        """Every fourth one is the end of an epoch."""
        self.waits += 1
        return SimpleNamespace(pairs=self.waits % 4, stop=False, micro_batches=[None])

    def steps(self, count: int) -> None:
        done = 0
        while done < count:
            if not self.batches.next().pairs:
                continue
            self.batches.prefetch()
            loss, _ = self.engine(*self.micro_batch)
            self.engine.backward(loss, 10)
            self.engine.step(1e-3)
            self.metrics.count()
            self.bar.show()
            done += 1
        # The loop asks for no batch after its last step.


def marks_of(run: Run) -> list[Any]:
    """What a profile changes."""
    owners = (run.engine, run.batches, run.metrics, run.bar, transformer, torch.distributed.Work)
    names = ("step", "backward", "next", "prefetch", "count", "show", "label_smoothed_cross_entropy", "wait")
    changed = [vars(owner).get(name) for owner in owners for name in names]
    return [*changed, *(vars(module).get("forward") for module in run.engine.objective.modules())]


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of each part."""
    lines = [re.split(r"  +", line.strip()) for line in table.split("```")[1].splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) == 4}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "checkpointing"), [(0, False), (1, True)])
def test_a_profile_has_a_trace_and_a_table_of_all_parts_and_leaves_nothing_behind(
    make_engine, batches, ranks: Ranks, tmp_path, stage, checkpointing
):
    run = Run(make_engine(zero_stage=stage, activation_checkpointing=checkpointing, dropout=0.1), batches[0])
    before, written = marks_of(run), list[Path]()
    with run.profiling(ranks, tmp_path, written):
        run.steps(ALL_STEPS)
        assert marks_of(run) != before
        run.steps(1)  # requests the batch after the last profiled step
        assert marks_of(run) == before
        run.steps(2)
    assert sum(run.excluded) > 0  # the time to write it is no part of training's
    assert written == [tmp_path / "profile_rank0.md"]
    table = written[0].read_text(encoding="utf-8")
    assert f"; {PROFILED_STEPS} steps\n" in table
    assert "# of Calls" in table
    rows, again = rows_of(table), 2 if checkpointing else 1
    assert rows["the step"][0] == "1.0"
    assert rows["the step"][2] == "100.0%"
    times = {"forward": 1, "attention": 3 * again, "feed-forward": 2 * again, "loss": 1, "backward": 1, "optimizer": 1}
    assert {part: float(rows[part][0]) for part in times} == times  # one layer on each side
    assert {"data", "tracking"} <= set(rows)
    shares = {part: float(rows[part][2].rstrip("%")) for part in ("forward", "backward", "attention", "loss")}
    assert 0 < shares["attention"] < 100
    assert 0 < shares["loss"] < shares["forward"] < 100 - shares["backward"]
    trace = json.loads(gzip.decompress((tmp_path / "trace_rank0.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("ProfilerStep#") for name in names) == PROFILED_STEPS
    assert names.count(PREFIX + "feed-forward") == 2 * again * PROFILED_STEPS


def test_a_run_that_ends_within_the_profiled_steps_has_those_done_and_one_that_ends_before_is_told(
    make_engine, batches, ranks: Ranks, tmp_path, caplog
):
    run = Run(make_engine(), batches[0])
    before = marks_of(run)
    with run.profiling(ranks, tmp_path / "some", []):
        run.steps(ALL_STEPS - 1)
    assert f"; {PROFILED_STEPS - 1} steps\n" in (tmp_path / "some" / "profile_rank0.md").read_text(encoding="utf-8")
    with run.profiling(ranks, tmp_path / "none", []):
        run.steps(BEFORE)
    assert f"none: this start ended before step {BEFORE + 1} of its own" in caplog.text
    assert not (tmp_path / "none").exists()
    assert marks_of(run) == before


def test_a_run_that_fails_leaves_no_marks(make_engine, batches, ranks: Ranks, tmp_path):
    run = Run(make_engine(), batches[0])
    before = marks_of(run)

    def fail() -> None:
        with run.profiling(ranks, tmp_path, []):
            run.steps(BEFORE + 1)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert marks_of(run) == before
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_warning(make_engine, batches, ranks: Ranks, tmp_path, caplog, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler_module, "write_text", full)
    run, written = Run(make_engine(), batches[0]), list[Path]()
    with run.profiling(ranks, tmp_path, written):
        run.steps(ALL_STEPS)
    assert "profile_rank0.md cannot be written: [Errno 28] No space left on device" in caplog.text
    assert written == []


@pytest.mark.slow
@pytest.mark.parametrize("steps", [ALL_STEPS + 1, BEFORE + 1])
@pytest.mark.parametrize("fails", [False, True])
def test_no_collective_is_on_its_way_when_the_profiler_stops(
    make_engine, batches, ranks: Ranks, tmp_path, monkeypatch, steps, fails
):
    """Gloo's threads record theirs in the list that the profiler then reads: this was a segmentation fault."""
    run = Run(make_engine(zero_stage=1), batches[0])
    stop, on_the_way = torch.profiler.profile.stop_trace, []

    def stop_trace(profiler: torch.profiler.profile) -> None:
        on_the_way.append(dict(run.engine._gather._pending))
        stop(profiler)

    monkeypatch.setattr(torch.profiler.profile, "stop_trace", stop_trace)
    with nullcontext() if not fails else pytest.raises(ArithmeticError), run.profiling(ranks, tmp_path, []):
        run.steps(steps)
        if fails:
            raise ArithmeticError
    assert on_the_way == [{}]
    run.steps(1)
    assert run.engine._gather._pending  # where nothing is profiled, a step ends before its weights have arrived
