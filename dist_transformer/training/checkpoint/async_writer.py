"""Saves during training: each rank copies its fragments, a thread writes the copy, all ranks confirm, rank 0 commits.

    begin    step_N.tmp/ is made, free space is checked; the fragments are copied; training continues
    thread   step_N.tmp/state_R.safetensors, fsync, SHA-256
    complete the scores of a validation that ends later
    finish   every rank reports whether its file is on disk; then state.json, manifest.json, rename to step_N/, `latest`

Only the last rename makes a checkpoint, so a kill at any moment leaves a complete one or none.
"""

import itertools
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import CheckpointError, MachineError
from dist_transformer.files import flush_to_disk, read_json_patiently, repeatedly, write_json, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.checkpoints import file_entry
from dist_transformer.training.checkpoint.tensor_files import (
    MANIFEST,
    STATE,
    VERSION,
    StateFiles,
    file_bit_sum,
    file_name,
    write_state_file,
)
from dist_transformer.training.engine.bit_sums import sums_by_part
from dist_transformer.training.engine.optimizer import PARTS
from dist_transformer.training.engine.sharded_state import Fragment

if TYPE_CHECKING:  # the engine is only passed in; importing it here would import DeepSpeed
    from dist_transformer.training.engine.engine import Engine

log = logging.getLogger(__name__)

SAVE_ATTEMPTS = 3
"""Attempts to write a checkpoint before it is given up: a busy disk often takes the second one."""
SECONDS_BETWEEN_ATTEMPTS = 1.0
LOOK_SECONDS = 0.2
"""Interval at which ranks that wait for files exchange how far they are."""
HEADER_BYTES = 256
"""Maximum size of a fragment's entry in the header of its file: name, type, size and start."""
MARGIN_BYTES = 2**20
"""Space for the small files and the filesystem itself."""


class AsyncWriter:
    """Writes the checkpoints of a run, one at a time, in the background.

    `progress` is called with a text at any real progress, never for mere waiting: a stalled disk is the watchdog's.
    """

    def __init__(self, run_dir: RunDir, ranks: Ranks, progress: Callable[[str], None]) -> None:
        self._run_dir, self._ranks, self._progress = run_dir, ranks, progress
        self._staging = StagingBuffer()
        self._pending: PendingSave | None = None

    def reserve(self, engine: "Engine") -> None:
        """Allocates the memory of the copy now, not at the first save (not collective)."""
        self._staging.take(engine.fragments())

    def begin(self, engine: "Engine", state: dict[str, Any]) -> None:
        """Copies this rank's part of the training state and begins to write it (collective).

        Args:
            state: other content of the checkpoint, at least "step" and "run_id"; copied.
        """
        assert self._pending is None, "a save is in flight: finish() comes first"
        final = self._run_dir.checkpoints / checkpoints.folder_name(state["step"])
        whole = {**state, "version": VERSION, "state_files": self._ranks.num_ranks, "shapes": engine.shapes()}
        save = PendingSave(final, json.loads(json.dumps(whole)), time.monotonic())
        save.was_there = self._ranks.from_rank_zero(lambda: _is_there(final, save.state))
        self._pending = save
        if not save.was_there:
            self._progress(f"copying the state for checkpoint {final.name}")
            fragments = engine.fragments()
            self._staging.take(fragments)
            sums = sums_by_part(fragments)
            save.bit_sum = int(sums.sum())
            save.state["bit_sums"] = dict(zip(PARTS, self._ranks.all_reduce_sum(sums.clone()).tolist(), strict=True))
            save.needed_bytes = sum(self._ranks.all_gather_object(self._staging.num_bytes))
            self._attempt(save)

    def complete(self, values: Mapping[str, Any]) -> None:
        """Replaces values of the state given to `begin` that were not known then (not collective)."""
        assert self._pending is not None, "no save is in flight"
        self._pending.state |= json.loads(json.dumps(values))

    def is_writing(self) -> bool:
        """True while this rank's file is not on disk."""
        return self._pending is not None and self._pending.writer is not None and self._pending.writer.is_alive()

    def finish(self) -> "PendingSave":
        """Waits for the files of all ranks and commits them (collective). Returns the save, the same on every rank.

        A save that fails is tried again from the same copy, SAVE_ATTEMPTS times in all, then given up.
        """
        save = self._pending
        assert save is not None, "no save is in flight"
        problem = None if save.was_there else self._confirm(save)
        for attempt in range(2, SAVE_ATTEMPTS + 1):
            if problem is None:
                break
            if self._ranks.is_rank_zero:
                log.warning("%s: %s; attempt %d of %d follows", save.path.name, problem, attempt, SAVE_ATTEMPTS)
            time.sleep(SECONDS_BETWEEN_ATTEMPTS)
            self._attempt(save)
            problem = self._confirm(save)
        self._pending = None
        if problem is not None:
            save.problem = self._ranks.from_rank_zero(lambda: self._give_up(save, problem))
        return save

    def _attempt(self, save: "PendingSave") -> None:
        """Makes an empty folder, and starts this rank's thread that writes into it (collective)."""
        save.problem = self._ranks.from_rank_zero(lambda: _prepare(save.temporary, save.needed_bytes))
        save.writer = None
        if save.problem is None:
            path = save.temporary / file_name(self._ranks.rank)
            save.writer = _Writer(path, self._staging, save.bit_sum)
            save.writer.start()

    def _confirm(self, save: "PendingSave") -> str | None:
        """Waits for every rank's file and commits. Returns the problem or None, the same on every rank (collective)."""
        if save.problem is not None:
            return save.problem
        writer = save.writer
        assert writer is not None  # `_attempt` makes it if there was no problem
        self._wait(writer, f"writing checkpoint {save.path.name}")
        results = self._ranks.all_gather_object((*writer.result(), writer.ended - save.began))
        save.seconds = max(seconds for *_, seconds in results)
        problems = [f"rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(results) if problem is not None]
        if problems:
            return "; ".join(problems[:3])
        self._progress(f"committing checkpoint {save.path.name}")
        entries = {file_name(rank): entry for rank, (entry, *_) in enumerate(results)}
        problem = self._ranks.from_rank_zero(lambda: _commit(save, entries))
        self._progress(f"after checkpoint {save.path.name}")
        return problem

    def _wait(self, writer: "_Writer", doing: str) -> None:
        """Waits until no rank writes (collective). Progress on one rank is progress on all, as others wait for it."""
        self._progress(doing)
        before = self._ranks.all_gather_object(writer.standing(self._ranks.is_rank_zero))
        while any(is_alive for is_alive, _, _ in before):
            writer.join(LOOK_SECONDS)
            now = self._ranks.all_gather_object(writer.standing(self._ranks.is_rank_zero))
            if now != before:
                self._progress(doing)
            before = now

    def _give_up(self, save: "PendingSave", problem: str) -> str:
        """Removes the unfinished files, and returns a message for people (rank 0)."""
        shutil.rmtree(save.temporary, ignore_errors=True)
        try:
            whole = checkpoints.saved(self._run_dir)
            kept = f"the run can resume from {whole[-1].name}" if whole else "there is no earlier checkpoint"
        except MachineError:  # of rank 0 alone
            kept = "earlier ones cannot be read now either"
        return (
            f"{problem} (attempts: {SAVE_ATTEMPTS}); {kept}. Free space or repair the filesystem of "
            f"{self._run_dir.checkpoints}"
        )


@dataclass
class PendingSave:
    """A save, between `begin` and `finish` and after it."""

    path: Path
    """Folder of the checkpoint."""
    state: dict[str, Any]
    began: float
    was_there: bool = False
    """True if an earlier start had written the checkpoint: nothing is done."""
    needed_bytes: int = 0
    bit_sum: int = 0
    """Sum of the bits of this rank's fragments in the engine's own memory: what was copied and written is compared with it."""
    problem: str | None = None
    """Problem of the preparation, with which nothing is written; in the end the reason for giving up, and what to do."""
    seconds: float = 0.0
    """Time from `begin` until all files were on disk."""
    writer: "_Writer | None" = None

    @property
    def temporary(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")


class StagingBuffer:
    """A copy of this rank's fragments, in memory that is allocated once."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)
        self.fragments: dict[str, Tensor] = {}
        self.starts: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Maximum size of the file that will hold the copy."""
        return sum(values.nbytes + HEADER_BYTES + len(key.encode()) for key, values in self.fragments.items())

    def take(self, fragments: list[Fragment]) -> None:
        """Copies the fragments; from a GPU into pinned memory, with one wait at the end."""
        keys = [fragment.key for fragment in fragments]
        assert len(set(keys)) == len(keys), "a rank holds one fragment of a tensor"
        sizes = [fragment.values.numel() for fragment in fragments]
        if sum(sizes) != self._buffer.numel():
            is_on_gpu = any(fragment.values.is_cuda for fragment in fragments)
            # One allocation for all: sizes of pinned memory are rounded up to powers of two.
            self._buffer = torch.empty(sum(sizes), dtype=torch.float32, pin_memory=is_on_gpu)
        begins = itertools.accumulate(sizes, initial=0)
        self.fragments = {
            fragment.key: self._buffer.narrow(0, begin, size).copy_(fragment.values.detach(), non_blocking=True)
            for fragment, begin, size in zip(fragments, begins, sizes, strict=False)
        }
        self.starts = {fragment.key: fragment.start for fragment in fragments}
        if any(fragment.values.is_cuda for fragment in fragments):
            torch.cuda.synchronize()


class _Writer(threading.Thread):
    """Thread that writes one rank's file. It is a daemon: a stalled disk must not keep the process from ending."""

    def __init__(self, path: Path, staging: StagingBuffer, expected_sum: int) -> None:
        super().__init__(name=f"writes {path.name}", daemon=True)
        self._path, self._staging, self._expected_sum = path, staging, expected_sum
        self._stages_done, self.ended = 0, 0.0
        self._outcome = Future[dict[str, Any]]()

    def run(self) -> None:
        try:
            write_state_file(self._path, self._staging.fragments, self._staging.starts)
            self._stages_done = 1
            flush_to_disk(self._path)
            self._stages_done = 2
            entry = file_entry(self._path)
            if file_bit_sum(self._path) != self._expected_sum:
                raise OSError("differs from the state in memory")
            self._outcome.set_result(entry)
        except BaseException as error:  # noqa: BLE001  (raised again by `result`, in the main thread)
            self._outcome.set_exception(error)
        self.ended = time.monotonic()

    def standing(self, looks: bool) -> tuple[bool, int, int]:
        """Returns (whether the thread runs, and two numbers that change only with progress); the second is of all ranks'
        files, at which one rank `looks`."""
        blocks = 0
        if looks:
            try:  # safetensors first writes a hidden file, at once of full length: only its blocks grow
                blocks = sum(path.stat().st_blocks for path in self._path.parent.iterdir())
            except OSError:
                blocks = -1  # a file was renamed meanwhile
        return self.is_alive(), self._stages_done, blocks

    def result(self) -> tuple[dict[str, Any] | None, str | None]:
        """Returns the file's manifest entry, or the disk's error, after the thread's end; raises any other error."""
        try:
            return self._outcome.result(), None
        except (OSError, SafetensorError, MemoryError) as error:
            return None, f"{self._path.name}: {error}"


def _is_there(final: Path, state: Mapping[str, Any]) -> bool:
    """True if an earlier start of this run wrote this checkpoint; that start or this one's load has verified it."""
    with suppress(OSError, MachineError, ValueError, KeyError, TypeError):
        manifest = read_json_patiently(final / MANIFEST)
        return bool((manifest["step"], manifest.get("run_id")) == (state["step"], state.get("run_id")))
    return False


def _prepare(temporary: Path, needed_bytes: int) -> str | None:
    """Makes an empty folder on a disk with enough space, or returns the problem."""
    try:
        # If its disk was unmounted, the run folder made anew would lie on another disk, below the mount point.
        if not temporary.parent.parent.is_dir():
            return f"the run folder {temporary.parent.parent} is gone"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
    except OSError as error:
        return str(error)
    if free < needed_bytes + MARGIN_BYTES:
        needed = (needed_bytes + MARGIN_BYTES) / 1e6
        return f"needs {needed:,.1f} MB, {free / 1e6:,.1f} MB are free on {temporary.parent}"
    return None


def _commit(save: PendingSave, entries: dict[str, Any]) -> str | None:
    """Turns the folder into a checkpoint; rank 0, when every rank's file is on disk. Returns the problem or None."""
    temporary, final, state = save.temporary, save.path, save.state
    try:
        write_json(temporary / STATE, state)
        StateFiles(temporary)  # checks that all ranks' files are visible, and that their fragments tile the tensors
        files = {**entries, STATE: file_entry(temporary / STATE)}
        identity = {"version": VERSION, "step": state["step"], "run_id": state.get("run_id")}
        write_json(temporary / MANIFEST, {**identity, "files": files})
        if final.exists() and not _is_there(final, state):  # another run's or a damaged one
            checkpoints.set_aside(final, "damaged")
        try:
            temporary.rename(final)
        except OSError:  # a file server may report an error of a rename that it has done
            if not _is_there(final, state):
                raise
            shutil.rmtree(temporary, ignore_errors=True)  # written again, where that error hid what was done
    except CheckpointError as error:
        return f"{error}. Is the run folder on a disk that all nodes share?"
    except (OSError, MachineError) as error:
        return str(error)
    try:
        repeatedly(final.parent, lambda: flush_to_disk(final.parent), (), "flushed")
        write_text(final.parent / "latest", final.name + "\n")  # for people and scripts; a resume does not read it
    except OSError as error:
        log.warning("%s is written, but could not be flushed or named in `latest`: %s", final.name, error)
    return None
