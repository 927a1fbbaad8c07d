"""Comparison of the memory that `plan` predicts with that of an engine: planned and measured peak, by part of the step.

    python benchmarks/memory_plan.py                    # one rank
    python benchmarks/memory_plan.py --ranks 2

The real engine computes one step of two equal micro-batches without padding. Measured is the peak of the bytes in
tensors: torch's CPU allocator reports each allocation and release to the profiler, to the byte and in order, beginning
before the model is built. (The process's own size would add libraries and memory kept by malloc; hooks on saved tensors
would miss gradients and short-lived tensors.) Garbage in reference cycles is collected between the parts of the step,
as happens at times in a long run. After each collective this thread waits until gloo's thread has released its
references to the tensors: memory released by a thread of gloo is not reported, and would count for ever. On CPUs
attention uses the flash kernel of `scaled_dot_product_attention` on fp32 copies, fp16 is multiplied as fp32 in the loss
and Adam makes a temporary copy: the plan includes these, but not for GPUs.
"""

import argparse
import gc
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import common
import torch
from common import Figures
from torch._C._distributed_c10d import Work
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from dist_transformer.config.schema import Config, OptimizerConfig
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning.activations import Shape
from dist_transformer.planning.memory import memory_of_rank
from dist_transformer.planning.vocabularies import vocabulary_sizes
from dist_transformer.processes.launching import start_local_ranks
from dist_transformer.training.engine import engine
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import Objective

MARK = "moment: "
NUM_MICRO_BATCHES = 2
GLOO_SECONDS = 0.01
SMALL = dict(d_model=128, d_ff=512, num_heads=4, num_encoder_layers=4, num_decoder_layers=4)
WIDE = dict(d_model=384, d_ff=1536, num_heads=6, num_encoder_layers=2, num_decoder_layers=2)
MANY_TOKENS, FEW_TOKENS = Shape(24, 48, 48), Shape(4, 12, 20)
CASES = [
    *[(SMALL, MANY_TOKENS, dict(zero_stage=stage, precision="fp32")) for stage in range(4)],
    *[(SMALL, MANY_TOKENS, dict(zero_stage=1, precision=precision)) for precision in ("bf16", "fp16")],
    *[(SMALL, MANY_TOKENS, dict(zero_stage=1, precision=p, activation_checkpointing=True)) for p in ("fp32", "bf16")],
    *[(WIDE, FEW_TOKENS, dict(zero_stage=0, precision=precision)) for precision in ("fp32", "bf16")],
    *[(WIDE, FEW_TOKENS, dict(zero_stage=stage, precision=p)) for stage in (1, 2, 3) for p in ("fp32", "fp16")],
    (WIDE, FEW_TOKENS, dict(zero_stage=1, precision="bf16", ema_decay=0.99)),
    *[
        (model, shape, dict(zero_stage=3, precision="bf16"))
        for model, shape in ((SMALL, MANY_TOKENS), (WIDE, FEW_TOKENS))
    ],
]
engine.INITIAL_LOSS_SCALE = 2
"""Low enough for a first update."""
LINEAR = torch.nn.functional.linear
"""The original function: stage 3 replaces it for all later engines of the process."""


def configuration(model: dict[str, int], training: dict[str, object], vocabulary: int) -> Config:
    """Returns a configuration with sequential micro-batches and a loss scale low enough for a first update."""
    values = {"data": {"lanes": 64}, "tokenizer": {"vocabulary_size": vocabulary}, "model": model}
    return Config.model_validate({**values, "training": training})


def measured(config: Config, shape: Shape, ranks: Ranks) -> Figures:
    """Measures peak bytes of a real step, in all and by moment, and those released without a report (collective)."""
    torch.manual_seed(1)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        engine = _step(config, shape, ranks)
        engine.wait_for_weights()  # gloo's threads must record nothing while the profiler stops
    engine.close()
    moment, in_use, unseen, peaks, sizes = "", 0, 0, {}, {}
    for event in sorted(all_events(recorded), key=lambda event: event.start_time_ns):
        if event.tag != _EventType.Allocation:
            moment = event.name.removeprefix(MARK) if event.name.startswith(MARK) else moment
            continue
        place, count = event.extra_fields.ptr, event.extra_fields.alloc_size
        if count > 0:
            unseen += sizes.get(place, 0)  # the previous block must have been released
            in_use += count - sizes.get(place, 0)
            sizes[place] = count
        else:
            in_use -= sizes.pop(place, 0)  # without blocks allocated before, by an earlier engine
        if moment:
            peaks[moment] = max(peaks.get(moment, 0), in_use)
    return {**peaks, "peak": max(peaks.values()), "unseen": unseen}


def all_events(recorded: profile) -> list[Any]:
    """Returns all recorded events, those with equal times in recorded order."""
    found, waiting = [], recorded.profiler.kineto_results.experimental_event_tree()[::-1]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].children[::-1]
    return found


def _release_in_this_thread() -> None:
    """Waits after each collective until gloo's thread has dropped its tensors, while this thread still holds them.

    The last thread to drop a tensor releases it, and the profiler does not see releases by gloo's thread.
    """
    wait = Work.wait

    def wait_longer(work: Work, *arguments: Any) -> bool:
        done = wait(work, *arguments)
        time.sleep(GLOO_SECONDS)
        return done

    Work.wait = wait_longer


def _step(config: Config, shape: Shape, ranks: Ranks) -> Engine:
    torch.nn.functional.linear = LINEAR
    training, (_, size) = config.training, vocabulary_sizes(config)
    checkpointing = training.activation_checkpointing
    model = Transformer(config.model, size, size, 0, activation_checkpointing=checkpointing).to(ranks.device)
    engine = Engine(Objective(model, training.label_smoothing, training.precision), training, OptimizerConfig(), ranks)
    engine.train()
    source, target = (torch.full((shape.rows, length), 5) for length in shape[1:])
    for number in range(1, NUM_MICRO_BATCHES + 1):
        _begin("forward")
        loss, nll = engine(source, target, target)
        _begin("backward")
        tokens = target.numel() * NUM_MICRO_BATCHES * ranks.num_ranks
        engine.backward(loss, tokens, is_last=number == NUM_MICRO_BATCHES)
        del loss, nll
    _begin("update")
    engine.step(1e-4)
    return engine


def _begin(moment: str) -> None:
    gc.collect()
    with record_function(MARK + moment):
        pass


def planned(config: Config, shape: Shape, num_ranks: int) -> Figures:
    memory = memory_of_rank(config, num_ranks, shape=shape, on_gpu=False, micro_batches=NUM_MICRO_BATCHES)
    return {**memory.moments, "peak": memory.peak_bytes}


def main() -> None:
    arguments = _arguments()
    if arguments.ranks > 1 and "RANK" not in os.environ:
        sys.exit(start_local_ranks(sys.argv[1:], arguments.ranks, program=[sys.executable, __file__]))
    ranks = group.join(600)
    logging.disable(logging.WARNING)
    _release_in_this_thread()
    found = common.begin(1) if ranks.is_rank_zero else {}
    rows, figures = [], {}
    for model, shape, training in [CASES[number] for number in arguments.cases]:
        config = configuration(model, training, arguments.vocabulary)
        plan, real = planned(config, shape, ranks.num_ranks), measured(config, shape, ranks)
        name = ", ".join([f"d_model {model['d_model']}", str(shape), *(f"{k}={v}" for k, v in training.items())])
        figures[name] = {"planned": plan["peak"], "measured": real["peak"], "moments": [plan, real]}
        rows.append(_row(name, plan, real))
    if ranks.is_rank_zero:
        print(f"\nranks: {ranks.num_ranks}, vocabulary {arguments.vocabulary:,}; MB of the first rank\n")
        print(common.markdown_table(["case", "planned", "measured", "planned to measured"], rows))
        ratios = [case["planned"] / case["measured"] for case in figures.values()]
        unseen = max(case["moments"][1]["unseen"] for case in figures.values())
        print(
            f"\nplanned to measured: {min(ratios):.3f} to {max(ratios):.3f}; released unseen: {unseen / 1e6:.1f} MB at most"
        )
        common.finish(arguments, found, {"memory": figures})
    group.leave()


def _row(name: str, plan: Figures, real: Figures) -> list[str]:
    return [name, f"{plan['peak'] / 1e6:,.1f}", f"{real['peak'] / 1e6:,.1f}", f"{plan['peak'] / real['peak']:.3f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--cases", type=_numbers, default=list(range(len(CASES))), help="some only: 0,3,5")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
