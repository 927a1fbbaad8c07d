"""Share of the machine's limits in a run: each part's arithmetic over the peak, or its bytes over a bandwidth.

    python benchmarks/limits.py                     # one thread; up to ten minutes
    python benchmarks/limits.py --preset base --vocabulary 37000 --max-tokens 4096 --precisions bf16

Every round measures the limit and the part directly after each other, so that other work on the machine affects both. A
share is the time at the limit over the time taken: 100 % would mean that the part does no other work.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import checkpoint
import common
import decode
import loader
import pyarrow.parquet as pq
import step
import torch
from common import Figures
from synthetic_corpus import write_tokens

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.planning.flops import model_flops
from dist_transformer.training.metrics.mfu import DTYPES, measured_flops

ADAM_BYTES = 7 * 4
"""Bytes of an update per fp32 parameter: weight, gradient and two moments are read, weight and moments are written."""
STATE_BYTES = 3 * 4
"""Bytes of a checkpoint per parameter: weight and two moments."""
PEAK_SECONDS = 0.3
COPIED_BYTES = 1 << 28
PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Part:
    """A part of the work and its limit.

    Attributes:
        limit: description of the limit.
        measure: returns the seconds at the limit, and the seconds taken.
    """

    what: str
    limit: str
    rest: str
    measure: Callable[[], tuple[float, float]]


def main() -> None:
    arguments = _arguments()
    found = common.begin(arguments.threads)
    ranks = group.join(600)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        parts = [part for parts in PARTS for part in parts(arguments, ranks, Path(name))]
        for part in parts:
            part.measure()  # warms up
        cases = {part.what: partial(_figures, part) for part in parts}
        rounds = common.interleaved(cases, arguments.rounds)
    print("\n" + _table(parts, rounds))
    group.leave()
    common.finish(arguments, found, {"limits": rounds})


def training(arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> Iterator[Part]:
    config = ModelConfig(preset=arguments.preset)
    batches = step.batches_of(arguments, ranks.device)
    shapes = [batch.shape for batch in batches]
    flops = sum(
        model_flops(config, arguments.vocabulary, s.pairs, s.source_tokens, s.target_tokens).total for s in shapes
    )
    for precision in arguments.precisions:
        ours = step.Ours(config, arguments.vocabulary, precision, 0, ranks)
        yield Part(
            f"training steps, {precision}",
            f"{flops / 1e9:.0f} GFLOP over the peak of a product in {precision}",
            "what is no product: attention's softmax, norms, dropout, residuals; the loss's softmax; the update; padding",
            partial(_training_seconds, ours, batches, flops, precision),
        )
    yield Part(
        "the update of them, fp32",
        f"{ADAM_BYTES * ours.num_parameters / 1e6:.0f} MB a step over the rate of a copy",
        "the norm of the gradient; the start of an operation for each tensor (not measured one by one)",
        partial(_update_seconds, step.Ours(config, arguments.vocabulary, "fp32", 0, ranks), batches),
    )


def _training_seconds(
    ours: step.Ours, batches: Sequence[MicroBatch], flops: float, precision: str
) -> tuple[float, float]:
    peak = measured_flops(torch.device("cpu"), DTYPES[precision], PEAK_SECONDS)
    return flops / peak, step.timed_steps(ours, batches)["wall_seconds"]


def _update_seconds(ours: step.Ours, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    at_limit = len(batches) * ADAM_BYTES * ours.num_parameters / _copied_bytes_per_second()
    return at_limit, step.timed_steps(ours, batches)["update"]


def translating(arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> Iterator[Part]:
    case = decode.Case(decode.random_model(arguments.preset, arguments.vocabulary, folder), folder, 1, 0)
    loaded = load_model_folder(case.folder)
    sentences, model = decode.source_ids(loaded, arguments), loaded.model
    length = len(sentences[0])
    read_bytes = 4 * (
        sum(weight.numel() for layer in model.decoder_layers for weight in layer.parameters())
        + model.output_weight.numel()
    )
    one = sentences[:2]
    yield Part(
        "translating one sentence at a time",
        f"{read_bytes / 1e6:.0f} MB of weights a token over the rate of reading them in one product",
        "the start of many small operations a token; the encoder",
        partial(_reading_seconds, case, one, read_bytes, length),
    )
    vocabulary, tokens = loaded.information.target_vocabulary, len(sentences) * length
    flops = model_flops(loaded.config, vocabulary, len(sentences), tokens, tokens).total / 3  # forward only
    yield Part(
        f"translating {len(sentences)} sentences together",
        f"{flops / 1e9:.0f} GFLOP over the peak of a product in fp32",
        "attention over the cache; log-softmax over the pieces",
        partial(_searching_seconds, case, sentences, flops),
    )


def _reading_seconds(case: decode.Case, sentences: decode.Ids, num_bytes: int, length: int) -> tuple[float, float]:
    columns = 1024
    weight = torch.rand(columns, num_bytes // columns // 4).T
    vector = torch.rand(columns)
    token_seconds = min(_seconds(lambda: weight @ vector) for _ in range(5))
    taken = _seconds(lambda: decode.translate(decode.OURS, case, [[ids] for ids in sentences]))
    return token_seconds * length * len(sentences), taken


def _searching_seconds(case: decode.Case, sentences: decode.Ids, flops: float) -> tuple[float, float]:
    peak = measured_flops(torch.device("cpu"), torch.float32, PEAK_SECONDS)
    return flops / peak, _seconds(lambda: decode.translate(decode.OURS, case, [sentences]))


def saving(arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> Iterator[Part]:
    """Yields three parts with one save each; the limit of each is measured beside it."""
    case = checkpoint.Case(arguments.checkpoint_size, 1, arguments, ranks, folder / "checkpoint")
    num_bytes = STATE_BYTES * case.num_parameters
    size = f"{num_bytes / 1e6:.0f} MB"

    def seconds(figure: str, bytes_per_second: Callable[[], float], times: int = 1) -> tuple[float, float]:
        return times * num_bytes / bytes_per_second(), case.ours()[figure]

    yield Part(
        "a checkpoint: training stands still",
        f"{size} read and written over the rate of a copy",
        "pages of memory that were given back after the last save; waiting for all ranks",
        partial(seconds, "begin_seconds", _copied_bytes_per_second, times=2),
    )
    yield Part(
        "a checkpoint: written behind training",
        f"{size} over the rate of the disk, flushed",
        "fresh pages of the page cache; checksums; the steps beside it",
        partial(seconds, "written_seconds", partial(_written_bytes_per_second, folder)),
    )
    yield Part(
        "a checkpoint: resumed from",
        f"{size} over the rate of reading and hashing a file",
        "copies into the engine's buffers",
        partial(seconds, "resume_seconds", partial(_hashed_bytes_per_second, folder)),
    )


def loading(arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> Iterator[Part]:
    corpus = write_tokens(folder / "tokens", arguments.pairs, arguments.vocabulary, 4096)
    run = corpus.run_data(lanes=1, max_tokens=arguments.max_tokens, window_rows=arguments.pairs)
    files = [corpus.folder / shard.file for shard in corpus.split.shards]

    def seconds() -> tuple[float, float]:
        reading = _seconds(lambda: [pq.read_table(file, use_threads=False) for file in files])
        return reading, _seconds(lambda: list(loader.epoch_steps(run)))

    yield Part(
        f"loading {arguments.pairs:,} pairs, in process",
        "pyarrow reading the same files, and no more",
        "the draw, sorting by length, padded tensors",
        seconds,
    )


PARTS = (training, translating, saving, loading)


def _copied_bytes_per_second() -> float:
    """Measures the rate of a copy; bytes read and bytes written both count."""
    source, target = torch.ones(2, COPIED_BYTES, dtype=torch.uint8).unbind()
    return 2 * COPIED_BYTES / min(_seconds(lambda: target.copy_(source)) for _ in range(3))


def _written_bytes_per_second(folder: Path) -> float:
    data = os.urandom(PIECE_BYTES)

    def write() -> None:
        with (folder / "written").open("wb") as file:
            for _ in range(COPIED_BYTES // PIECE_BYTES):
                file.write(data)
            os.fsync(file.fileno())

    return COPIED_BYTES / _seconds(write)


def _hashed_bytes_per_second(folder: Path) -> float:
    _written_bytes_per_second(folder)

    def read() -> None:
        with (folder / "written").open("rb") as file:
            hashlib.file_digest(file, "sha256")

    return COPIED_BYTES / _seconds(read)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _figures(part: Part) -> Figures:
    at_limit, taken = part.measure()
    return {"seconds_at_limit": at_limit, "seconds": taken, "share": at_limit / taken}


def _table(parts: Sequence[Part], rounds: common.Rounds) -> str:
    header = ["part", "limit", "at the limit, s", "taken, s", "share", "range", "what takes the rest"]
    rows = []
    for part in parts:
        samples = rounds[part.what]
        seconds = [f"{common.median(samples, name):.3g}" for name in ("seconds_at_limit", "seconds")]
        shares = sorted(sample["share"] for sample in samples)
        share = f"{common.median(samples, 'share'):.0%}"
        rows.append([part.what, part.limit, *seconds, share, f"{shares[0]:.0%} to {shares[-1]:.0%}", part.rest])
    return common.markdown_table(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=("tiny", "small", "base", "big"), default="small")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch: both sides, padding counted")
    parser.add_argument("--steps", type=int, default=3, help="of a round of training")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--sentences", type=int, default=64, help="translated together")
    parser.add_argument("--checkpoint-size", choices=tuple(checkpoint.SIZES), default="60M", help="parameters")
    parser.add_argument("--pairs", type=int, default=100_000, help="of the loaded corpus")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="disk to write to; default: the system's temporary folder")
    parser.set_defaults(source=None, precision="fp32")
    return common.arguments_of(parser, rounds=3)


if __name__ == "__main__":
    main()
