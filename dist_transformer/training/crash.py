"""Record of a failed rank and its micro-batches, to be computed again on one rank by `train RUN --replay-crash`.

crash/rank_00003/crash.json          exception, traceback, step, lanes and row ids of the micro-batches, versions
                 config.yaml         the configuration of that start
                 batch.safetensors   lane_0003/source, lane_0003/target_in, lane_0003/target_out: (pairs, length)
"""

import json
import logging
import platform
import shutil
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dist_transformer import __version__
from dist_transformer.config.credentials import without_secrets
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.config.schema import Config
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.distributed.group import Ranks, explain
from dist_transformer.errors import UserError
from dist_transformer.files import flush_to_disk, read_json, write_json, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record
from dist_transformer.training.global_batch import GlobalBatch
from dist_transformer.training.train_state import TrainState

log = logging.getLogger(__name__)

SIDES = ("source", "target_in", "target_out")


@dataclass(frozen=True)
class Crash:
    """One rank's record of its failure."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def lanes(self) -> list[int]:
        """Lanes of the micro-batches that the rank was working on."""
        return [int(lane) for lane in self.values["micro_batches"]]

    def pairs_and_tokens(self, lane: int) -> tuple[int, int]:
        """Returns the numbers of real pairs and target tokens of a lane's micro-batch."""
        micro_batch = self.values["micro_batches"][str(lane)]
        return len(micro_batch["row_ids"]), int(micro_batch["target_tokens"])

    def sides(self, lane: int) -> list[Tensor]:
        """Returns source_BS, target_in_BT and target_out_BT of a lane's micro-batch."""
        return [self.tensors[_key(lane, side)] for side in SIDES]

    def config(self, overrides: list[str] | None = None) -> Config:
        """Returns the configuration of the start that failed."""
        return load_config(self.path / "config.yaml", overrides, check_files=False)


def write_crash(
    run_dir: RunDir,
    ranks: Ranks,
    error: BaseException,
    config: Config,
    progress: TrainState | None,
    batch: GlobalBatch | None,
) -> Path | None:
    """Writes this rank's folder and replaces an older one; an error of writing is only logged. Not collective.

    Args:
        progress, batch: state and current batch of the loop; None if it had not begun.
    """
    folder = _folder(run_dir, ranks.rank)
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        micro_batches = [mb for mb in (batch.micro_batches if batch else []) if mb is not None]
        start = read_record(run_dir.state).get("starts", 0)
        write_json(temporary / "crash.json", {"start": start, **_values(ranks, error, progress, batch, micro_batches)})
        write_text(temporary / "config.yaml", to_yaml(config))
        save_file(_tensors(micro_batches), temporary / "batch.safetensors")
        flush_to_disk(temporary / "batch.safetensors")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError, RuntimeError, MemoryError) as problem:  # must not hide the failure itself
        log.error("crash      rank %d could not write %s: %s", ranks.rank, folder, problem)
        shutil.rmtree(temporary, ignore_errors=True)
        return None
    return folder


def read_crash(run_dir: RunDir, rank: int | None) -> Crash:
    """Reads the record of this rank; None: of the rank of the newest start that failed by itself.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folders = sorted(run_dir.crash.glob("rank_?????"))
    if rank is not None:
        folders = [folder for folder in folders if folder == _folder(run_dir, rank)]
    if not folders:
        known = ", ".join(str(int(f.name.removeprefix("rank_"))) for f in sorted(run_dir.crash.glob("rank_?????")))
        raise UserError(
            f"{run_dir.crash}: nothing to replay: {'no rank of this run' if rank is None else f'rank {rank}'} left "
            f"{'a' if rank is None else 'no'} record of a crash"
            + (
                f"; there are those of ranks {known}"
                if known
                else ": a stop, or an error that a person can fix, is none"
            )
        )
    crashes = [_read(folder) for folder in folders]
    return max(
        crashes,
        key=lambda crash: (crash.values["start"], crash.values["follows_another"] is None, crash.values["time"]),
    )


def _values(
    ranks: Ranks,
    error: BaseException,
    progress: TrainState | None,
    batch: GlobalBatch | None,
    micro_batches: list[MicroBatch],
) -> dict[str, Any]:
    return {
        "version": 1,
        "rank": ranks.rank,
        "num_ranks": ranks.num_ranks,
        "host": platform.node(),
        "device": ranks.device.type,
        "time": round(time.time(), 3),
        "exception": type(error).__name__,
        "text": without_secrets(str(error)),
        "follows_another": explain(error),
        "collective": ranks.last.text(),
        "traceback": without_secrets("".join(traceback.format_exception(error))),
        "step": progress.step + 1 if progress else None,
        "batches": progress.batches if progress else None,
        "target_tokens": batch.target_tokens if batch else None,
        "batch_digest": batch.digest if batch else None,
        "micro_batches": {
            str(mb.lane): {"row_ids": mb.row_ids.tolist(), "target_tokens": mb.shape.target_tokens}
            for mb in micro_batches
        },
        "versions": {
            "dist_transformer": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "deepspeed")},
        },
    }


def _tensors(micro_batches: list[MicroBatch]) -> dict[str, Tensor]:
    tensors = {}
    for mb in micro_batches:
        for side, tensor in zip(SIDES, (mb.source_BS, mb.target_in_BT, mb.target_out_BT), strict=True):
            tensors[_key(mb.lane, side)] = tensor.contiguous()
    return tensors


def _read(folder: Path) -> Crash:
    try:
        crash = Crash(folder, read_json(folder / "crash.json"), load_file(folder / "batch.safetensors"))
        keys = {"step", "batches", "target_tokens", "micro_batches", "time", "follows_another", "exception", "text"}
        if missing := sorted(keys - set(crash.values)) + [
            _key(lane, side) for lane in crash.lanes for side in SIDES if _key(lane, side) not in crash.tensors
        ]:
            raise ValueError(f"has no {missing[0]}")
    except (OSError, json.JSONDecodeError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read as the record of a crash ({error}); give another rank's") from error
    return crash


def _folder(run_dir: RunDir, rank: int) -> Path:
    return run_dir.crash / f"rank_{rank:05d}"


def _key(lane: int, side: str) -> str:
    return f"lane_{lane:04d}/{side}"
