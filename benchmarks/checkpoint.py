"""Costs of a checkpoint: the time that training waits for a save, and the time of a resume.

    python benchmarks/checkpoint.py                             # 60 M and 200 M parameters, ZeRO 0 to 3, one rank
    python benchmarks/checkpoint.py --sizes 60M --stages 1 3 --ranks 2

Ours: the real engine and writer. Training waits while the state is copied (`begin`) and while the files of all ranks
are confirmed and committed (`finish`); in between it continues, perhaps slower, while a thread writes, flushes to disk
and hashes. The cost is the sum of both. Beside it, on the same engine: DeepSpeed's `save_checkpoint`, during which no
step is trained, and which neither flushes nor computes checksums. A resume of ours checks every byte against its
checksum before it loads. Files that were just written are in the page cache for both.
"""

import argparse
import contextlib
import gc
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from common import Figures, Rounds

from dist_transformer.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.processes.launching import start_local_ranks
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective

SIZES = {"tiny": ("tiny", 500), "60M": ("base", 32_000), "200M": ("big", 24_000)}
"""Preset and vocabulary of each size."""
OURS, DEEPSPEED = "ours", "DeepSpeed"
RUN_ID = "benchmark"
SEED = 1
BUDGET_SECONDS = 12.0
"""Budget of a save: 2 % of the 10 minutes between two saves."""


class Case:
    """One engine that trains, saves and resumes in both ways."""

    def __init__(self, size: str, stage: int, arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> None:
        torch.manual_seed(SEED)
        preset, vocabulary = SIZES[size]
        model = Transformer(ModelConfig(preset=preset), vocabulary, vocabulary, 0)
        training = TrainingConfig(precision=arguments.precision, zero_stage=stage)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        objective = Objective(model, training.label_smoothing, training.precision)
        self.engine = Engine(objective, training, OptimizerConfig(), ranks)
        self.engine.train()
        self._ranks, self._folder, self._run_dir = ranks, folder, RunDir(folder / "ours")
        self._run_dir.path.mkdir(parents=True, exist_ok=True)
        self._saver = AsyncWriter(self._run_dir, ranks, lambda doing: None)
        shape = (2, 4, max(1, arguments.max_tokens // 8))
        self._ids = torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(SEED)).to(ranks.device)
        self._steps = 0
        self.step_seconds()  # chooses kernels

    def step_seconds(self) -> float:
        """Measures a step on one micro-batch."""
        source, target = self._ids
        self._ranks.barrier()
        began = time.perf_counter()
        loss, _ = self.engine(source, target, target)
        self.engine.backward(loss, target.numel() * self._ranks.num_ranks)
        self.engine.step(1e-4)
        _synchronize(self._ranks)
        self._steps += 1
        return time.perf_counter() - began

    def ours(self) -> Figures:
        """Measures a save during training, then a resume from it."""
        alone = statistics.median([self.step_seconds() for _ in range(3)])
        began = time.perf_counter()
        counts = dict.fromkeys(("batches", "skipped_updates", "total_target_tokens"), 0)
        self._saver.begin(self.engine, {"step": self._steps, "run_id": RUN_ID, **counts, "position": {}, "recipe": {}})
        begin_seconds = time.perf_counter() - began
        steps = []
        while self._ranks.all_reduce_sum(torch.tensor([self._saver.is_writing()], dtype=torch.int64)).item():
            steps.append(self.step_seconds())
        confirming = time.perf_counter()
        saved = self._saver.finish()
        finish_seconds = time.perf_counter() - confirming
        assert saved is not None and saved.problem is None, saved  # noqa: PT018
        slowed_seconds = sum(seconds - alone for seconds in steps)
        still_seconds = begin_seconds + finish_seconds
        figures = {
            "begin_seconds": begin_seconds,
            "finish_seconds": finish_seconds,
            "still_seconds": still_seconds,
            "step_seconds_alone": alone,
            "steps_while_writing": len(steps),
            "slowed_seconds": slowed_seconds,
            "lost_seconds": still_seconds + slowed_seconds,
            "written_seconds": saved.seconds,
            "megabytes": sum(path.stat().st_size for path in saved.path.iterdir()) / 1e6,
            "resume_seconds": self._timed(self._resume),
        }
        return self._cleared(saved.path, figures)

    def deepspeed(self) -> Figures:
        """Measures the same with DeepSpeed's own functions."""
        folder, native = self._folder / "deepspeed", self.engine._engine
        seconds = self._timed(lambda: native.save_checkpoint(str(folder), tag="now"))
        figures = {
            "still_seconds": seconds,
            "lost_seconds": seconds,
            "megabytes": sum(path.stat().st_size for path in folder.rglob("*.pt")) / 1e6,
            "resume_seconds": self._timed(lambda: native.load_checkpoint(str(folder), tag="now")),
        }
        return self._cleared(folder, figures)

    def _resume(self) -> None:
        checkpoint = self._ranks.from_rank_zero(lambda: checkpoints.newest_complete(self._run_dir, RUN_ID))
        checkpoints.load(checkpoint, self.engine)

    def _timed(self, work: Callable[[], Any]) -> float:
        self._ranks.barrier()
        began = time.perf_counter()
        work()
        _synchronize(self._ranks)
        self._ranks.barrier()
        return time.perf_counter() - began

    def _cleared(self, folder: Path, figures: Figures) -> Figures:
        self._ranks.barrier()
        if self._ranks.is_rank_zero:
            shutil.rmtree(folder)
        self._ranks.barrier()
        return figures


def main() -> None:
    arguments = _arguments()
    if arguments.ranks > 1 and "RANK" not in os.environ:
        sys.exit(start_local_ranks(sys.argv[1:], arguments.ranks, program=[sys.executable, __file__]))
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0":
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        found = common.begin(arguments.threads)
        logging.disable(logging.ERROR)
        ranks = group.join(1800)
        folder = Path(ranks.from_rank_zero(lambda: tempfile.mkdtemp(dir=arguments.folder)))
        try:
            rounds, parameters = _measure(arguments, ranks, folder)
        finally:
            if ranks.is_rank_zero:
                shutil.rmtree(folder, ignore_errors=True)
        print(_description(arguments, parameters) + "\n\n" + _table(rounds))
        if ranks.is_rank_zero:
            common.finish(arguments, found, {"parameters": parameters, "checkpoint": rounds})
    group.leave()


def _measure(arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> tuple[dict[str, Rounds], dict[str, int]]:
    """Measures one engine at a time, as all of them would not fit into memory."""
    rounds, parameters = {}, {}
    for size in arguments.sizes:
        for stage in arguments.stages:
            case = Case(size, stage, arguments, ranks, folder / f"{size}-{stage}")
            parameters[size] = case.num_parameters
            ways: dict[str, Callable[[], Figures]] = {OURS: case.ours, DEEPSPEED: case.deepspeed}
            common.interleaved(ways, 1)  # warms up: allocates memory that is reused
            rounds[f"{size}, ZeRO {stage}"] = common.interleaved(ways, arguments.rounds)
            case.engine.close()
            del case, ways
            gc.collect()
    return rounds, parameters


def _synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def _description(arguments: argparse.Namespace, parameters: dict[str, int]) -> str:
    sizes = ", ".join(f"{size}: {number / 1e6:.1f} M parameters" for size, number in parameters.items())
    return (
        f"{sizes}; ranks: {arguments.ranks}, threads of each: {arguments.threads}, {arguments.precision}; files in "
        f"{arguments.folder or tempfile.gettempdir()}; seconds, medians of rounds: {arguments.rounds}"
    )


def _table(rounds: dict[str, Rounds]) -> str:
    header = [
        "model", "MB", "copy", "commit", "stands still", "steps slowed by", "lost in all", "written after", "a step alone",
        "DeepSpeed's save", "ours to it: still", "lost", "resume", "DeepSpeed's load",
        f"budget {BUDGET_SECONDS:.0f} s",
    ]  # fmt: skip
    rows = []
    for model, ways in rounds.items():
        ours, theirs = ways[OURS], ways[DEEPSPEED]
        figure = partial(common.median, ours)
        lost = figure("lost_seconds")
        names = ("begin", "finish", "still", "slowed", "lost", "written")
        seconds = [f"{figure(f'{name}_seconds'):.2f}" for name in names]
        ratios = [f"{common.median_ratio(ours, theirs, f'{name}_seconds'):.2f}" for name in ("still", "lost")]
        rows.append([
            model, f"{figure('megabytes'):,.0f}", *seconds, f"{figure('step_seconds_alone'):.2f}",
            f"{common.median(theirs, 'still_seconds'):.2f}", *ratios, f"{figure('resume_seconds'):.2f}",
            f"{common.median(theirs, 'resume_seconds'):.2f}", "kept" if lost <= BUDGET_SECONDS else "above",
        ])  # fmt: skip
    return common.markdown_table(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["60M", "200M"])
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, default=1, help="processes of this machine")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of the micro-batch of a step, both sides")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--folder", type=Path, help="disk to write to; default: the system's temporary folder")
    return common.arguments_of(parser, rounds=5)


if __name__ == "__main__":
    main()
