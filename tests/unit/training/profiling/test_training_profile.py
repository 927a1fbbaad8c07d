"""Where a step goes: spans put into parts by hand and by a real engine, and what a profile leaves behind."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_torch import MicroBatch

from dist_transformer.distributed.group import Ranks
from dist_transformer.model import transformer
from dist_transformer.planning.flops import ModelFlops
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.metrics.mfu import Peak
from dist_transformer.training.profiling import profiler as profiling_module
from dist_transformer.training.profiling.accounting import BACKWARD_NODE, PARTS, PREFIX, Span, account
from dist_transformer.training.profiling.profiler import (
    PLAIN_STEPS,
    PROFILED_STEPS,
    WARM_UP_STEPS,
    Job,
    Watched,
    profiling,
)
from dist_transformer.training.profiling.table import RankProfile, summary_of

ALL_STEPS = WARM_UP_STEPS + PLAIN_STEPS + PROFILED_STEPS
FLOPS = ModelFlops(projections=2e9, scores=1e9, feed_forward=3e9, output=4e9)


def ours(name: str, start: float, end: float) -> Span:
    return Span(PREFIX + name, 1, start, end, -1, True, 0.0)


def operator(name: str, start: float, end: float, sequence: int = -1, thread: int = 1, device: float = 0.0) -> Span:
    return Span(name, thread, start, end, sequence, False, device)


STEP = [
    ours("step", 0, 1000),
    ours("data", 10, 60),
    ours("forward", 100, 400),
    operator("aten::embedding", 110, 130, sequence=6),
    ours("attention", 150, 250),
    operator("aten::linear", 160, 230, sequence=7),
    operator("aten::addmm", 170, 220, sequence=7),
    ours("loss", 300, 390),
    operator("_ChunkedCrossEntropy", 310, 380, sequence=8),
    ours("backward", 400, 800),
    operator(BACKWARD_NODE + "LossBackward", 410, 430, sequence=8),
    operator(BACKWARD_NODE + "AddmmBackward0", 450, 550, sequence=7),
    operator("aten::mm", 460, 540),
    operator(BACKWARD_NODE + "torch::autograd::AccumulateGrad", 600, 620),
    operator("c10d::allreduce_", 700, 720),
    ours("communication", 730, 790),
    ours("optimizer", 800, 950),
    operator("aten::_fused_adam_", 810, 940),
]


def test_a_span_belongs_to_the_innermost_range_and_a_backward_operation_to_the_sub_layer_of_its_forward_one():
    found = account([operator("before", -50, -10), *STEP, operator("elsewhere", 0, 900, thread=2)])
    assert {part: (spent.operators, spent.between) for part, spent in found.parts.items()} == {
        "the loop": (0, 1000 - 50 - 300 - 400 - 150),
        "data": (0, 50),
        "forward: the rest": (20, 300 - 20 - 100 - 90),
        "forward: attention": (70, 30),
        "loss": (70 + 20, 20),
        "backward: the rest": (20, 400 - 20 - 100 - 20 - 20 - 60),
        "backward: attention": (100, 0),
        "communication": (20, 60),
        "optimizer": (130, 20),
    }
    assert found.microseconds == 1000
    assert found.operators["aten::linear"] == 20
    assert found.operators["AddmmBackward0"] == 20
    assert found.calls["aten::mm"] == 1


def test_a_layer_that_is_computed_again_is_a_part_of_the_backward_pass():
    again = [ours("attention", 640, 690), operator("aten::addmm", 650, 680, sequence=20)]
    found = account([*STEP, *again])
    assert found.parts["backward: attention"].operators == 100 + 30
    assert found.parts["forward: attention"].operators == 70


def test_what_a_validation_computes_is_a_part_of_it_alone():
    inside = [
        ours("validation", 910, 990), ours("forward", 915, 950), ours("attention", 920, 940),
        operator("aten::linear", 922, 938), ours("attention", 955, 985), operator("aten::mm", 960, 980),
    ]  # fmt: skip
    found = account([*STEP, *inside])
    assert (found.parts["validation"].operators, found.parts["validation"].between) == (16 + 20, 80 - 36)
    assert found.parts["forward: attention"].operators == 70
    assert set(found.parts) <= set(PARTS)
    assert found.microseconds == 1000


def test_kernels_of_a_gpu_count_where_they_were_started_also_by_the_thread_of_the_backward_pass():
    on_main = operator("cudaLaunchKernel", 180, 190, device=300)
    backward = [
        operator(BACKWARD_NODE + "AddmmBackward0", 450, 550, sequence=7, thread=2, device=0),
        operator("aten::mm", 460, 540, thread=2, device=700),
        operator("aten::add_", 560, 570, thread=2, device=11),
    ]
    found = account([*STEP, on_main, *backward])
    assert found.parts["forward: attention"].device == 300
    assert found.parts["backward: attention"].device == 700
    assert found.parts["backward: the rest"].device == 11
    assert found.microseconds == 1000


@pytest.mark.parametrize(("has_gpu", "device"), [(False, 0.0), (True, 50.0)])
def test_the_table_sets_flops_of_a_part_against_its_time_and_the_peak(has_gpu, device):
    spans = [span._replace(device_us=device) if span.name == "aten::addmm" else span for span in STEP]
    profile = RankProfile("rank 0", 1, 2e-3, 1e-3, 5e9, FLOPS, account(spans), Peak(None, 100e12), has_gpu)
    text = "\n".join(summary_of(profile))
    assert text.startswith("rank 0; 1 steps\n")
    assert ("1.0 ms of the CPUs (5,000.0 GFLOP in a second of a CPU)" in text) != has_gpu
    assert "5.00 GFLOP a step for its real tokens: 2,500.0 GFLOP/s, 2.5% of the 100,000.0 GFLOP/s measured" in text
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()[5:]
    }
    busy = 50e-6 if has_gpu else 100e-6  # of attention in the forward pass, a third of whose 3 GFLOP are there
    assert rows["forward: attention"][:3] == ["0.10", "10.0%", "0.03"]
    assert rows["forward: attention"][-3:] == ["1.000", f"{1 / busy:,.1f}", f"{1e9 / busy / 100e12:.1%}"]
    assert rows["optimizer"][-3:] == ["", "", ""]
    assert rows["the step"][:2] == ["1.00", "100.0%"]


class Run:
    """The loop of training in small, over a real engine."""

    def __init__(self, engine: Engine, micro_batch: MicroBatch) -> None:
        self.engine, self.micro_batch, self.waits = engine, micro_batch, 0
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        self.batches = SimpleNamespace(next=self.next_batch, prefetch=nothing)
        self.excluded: list[float] = []
        self.metrics = SimpleNamespace(count=nothing, log=nothing, audit=nothing, exclude=self.excluded.append)
        validation = SimpleNamespace(validate=nothing)
        writer, bar = SimpleNamespace(begin=nothing, finish=nothing), SimpleNamespace(show=nothing)
        parts: Any = (engine, self.batches, self.metrics, validation, writer, bar)
        self.watched = Watched(*parts)

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
            done += 1
        # The loop asks for no batch after its last step.


def job_of(ranks: Any, folder: Path, written: list[Path]) -> Job:
    return Job(ranks, folder, "fp32", Peak(None, 1e9), lambda _: None, written.append)


def marks_of(run: Run) -> list[Any]:
    """What a profile changes."""
    modules = list(run.engine.objective.modules())
    return [
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        [
            vars(part).get(name)
            for part in (run.engine, run.batches, run.metrics)
            for name in ("step", "prefetch", "count")
        ],
        [transformer.label_smoothed_cross_entropy, torch.distributed.Work.wait, run.batches.next],
    ]


@pytest.mark.parametrize(("stage", "checkpointing"), [(0, False), (1, True)])
def test_a_profile_has_a_trace_and_a_table_of_all_parts_and_leaves_nothing_behind(
    make_engine, batches, ranks: Ranks, tmp_path, stage, checkpointing
):
    run = Run(make_engine(zero_stage=stage, activation_checkpointing=checkpointing, dropout=0.1), batches[0])
    before, written = marks_of(run), list[Path]()
    with profiling(run.watched, job_of(ranks, tmp_path, written), lambda _: FLOPS):
        run.steps(WARM_UP_STEPS + PLAIN_STEPS)
        assert marks_of(run)[0] == before[0]
        run.steps(PROFILED_STEPS)
        assert marks_of(run)[0] != before[0]
        run.steps(2)
        assert marks_of(run)[:2] == before[:2]
    assert marks_of(run) == before
    assert sum(run.excluded) > 0  # the time to write it is no part of training's
    assert written == [tmp_path / "profile.md"]
    table = written[0].read_text(encoding="utf-8")
    parts = (
        "data",
        "forward: attention",
        "forward: feed-forward",
        "loss",
        "backward: attention",
        "backward: feed-forward",
    )
    for part in (*parts, "backward: the rest", "optimizer", "tracking and logging", "the loop"):
        assert f"| {part} " in table
    assert f"; {PROFILED_STEPS} steps\n" in table
    assert "10.00 GFLOP a step" in table
    trace = json.loads(gzip.decompress((tmp_path / "trace_rank0.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count(PREFIX + "step") == PROFILED_STEPS
    again = PROFILED_STEPS if checkpointing else 0
    assert names.count(PREFIX + "feed-forward") == 2 * (PROFILED_STEPS + again)  # one layer on each side


def test_a_run_that_ends_within_the_profiled_steps_has_those_done_and_one_that_ends_before_is_told(
    make_engine, batches, ranks: Ranks, tmp_path, caplog
):
    run = Run(make_engine(), batches[0])
    with profiling(run.watched, job_of(ranks, tmp_path / "some", []), lambda _: FLOPS):
        run.steps(ALL_STEPS - 1)
    assert f"; {PROFILED_STEPS - 2} steps\n" in (tmp_path / "some" / "profile.md").read_text(encoding="utf-8")
    with profiling(run.watched, job_of(ranks, tmp_path / "none", []), lambda _: FLOPS):
        run.steps(WARM_UP_STEPS + PLAIN_STEPS)
    assert f"none: this start ended before step {WARM_UP_STEPS + PLAIN_STEPS + 2} of its own" in caplog.text
    assert not (tmp_path / "none").exists()


def test_a_run_that_fails_leaves_no_marks(make_engine, batches, ranks: Ranks, tmp_path):
    run = Run(make_engine(), batches[0])
    before = marks_of(run)

    def fail() -> None:
        with profiling(run.watched, job_of(ranks, tmp_path, []), lambda _: FLOPS):
            run.steps(WARM_UP_STEPS + PLAIN_STEPS + 1)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert marks_of(run) == before
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_rank_0_and_the_one_that_others_wait_for_and_a_full_disk_is_a_warning(
    make_engine, batches, tmp_path, caplog, monkeypatch
):
    run, slow = Run(make_engine(), batches[0]), (1e9, "what rank 2 said")
    three: Any = SimpleNamespace(
        rank=0,
        num_ranks=3,
        is_rank_zero=True,
        device=torch.device("cpu"),
        all_gather_object=lambda mine: [mine, (0.0, "rank 1"), slow],
    )
    with profiling(run.watched, job_of(three, tmp_path / "good", []), lambda _: FLOPS):
        run.steps(ALL_STEPS)
    table = (tmp_path / "good" / "profile.md").read_text(encoding="utf-8")
    assert "rank 0 of 3" in table
    assert "what rank 2 said" in table
    assert "rank 1\n" not in table

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling_module, "write_text", full)
    written: list[Path] = []
    with profiling(run.watched, job_of(three, tmp_path / "full", written), lambda _: FLOPS):
        run.steps(ALL_STEPS)
    assert "profile.md cannot be written: [Errno 28] No space left on device" in caplog.text
    assert written == []
