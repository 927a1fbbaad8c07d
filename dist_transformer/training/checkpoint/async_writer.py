"""Saves while training goes on: this rank's fragments are copied, a thread writes the copy, all ranks confirm, one commits.

    begin    step_N.tmp/ is made, free space is looked at; the fragments are copied; training goes on
    thread   step_N.tmp/state_R.safetensors, fsync, SHA-256
    complete the scores of a validation that was still to come
    finish   every rank says whether its file is on disk; then state.json, manifest.json, rename to step_N/, `latest`

Nothing but the last rename makes a checkpoint, so a kill at any moment leaves a whole one or none.
"""

import itertools
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import CheckpointError, MachineError
from dist_transformer.files import flush_to_disk, write_json, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.checkpoints import file_entry
from dist_transformer.training.checkpoint.tensor_files import (
    MANIFEST,
    STATE,
    VERSION,
    StateFiles,
    file_name,
    write_state_file,
)

if TYPE_CHECKING:  # the engine is only handed in; importing it here would import DeepSpeed
    from dist_transformer.training.engine.engine import Engine, Fragment

log = logging.getLogger(__name__)

SAVE_ATTEMPTS = 3
"""Attempts to write a checkpoint before it is given up: a busy disk often takes the second one."""
SECONDS_BETWEEN_ATTEMPTS = 1.0
LOOK_SECONDS = 0.2
"""How often the ranks tell each other how far their files are, once they wait for them."""
HEADER_BYTES = 256
"""At most, of one fragment in its file's header: its name, type, size and start."""
MARGIN_BYTES = 2**20
"""For the small files and what a filesystem needs itself."""


@dataclass(frozen=True)
class Saved:
    """How a save ended, the same on every rank."""

    step: int
    path: Path | None
    """None: it was given up."""
    problem: str | None
    """Why it was given up, what there is instead, and what to do."""
    seconds: float
    """From `begin` until all was on disk."""
    was_there: bool = False
    """An earlier start had written it: nothing was done."""


class AsyncWriter:
    """Writes the checkpoints of a run, one at a time, in the background.

    `progress` is told what is done whenever something moved, never for mere waiting: a stalled disk is the watchdog's.
    """

    def __init__(self, run_dir: RunDir, ranks: Ranks, progress: Callable[[str], None]) -> None:
        self._run_dir, self._ranks, self._progress = run_dir, ranks, progress
        self._snapshot = StagingBuffer()
        self._flight: PendingSave | None = None

    def reserve(self, engine: "Engine") -> None:
        """Takes the memory of the copy now, not at the first save (not collective)."""
        self._snapshot.take(engine.fragments())

    def begin(self, engine: "Engine", state: dict[str, Any]) -> None:
        """Copies this rank's part of the training state and begins to write it (collective).

        Args:
            state: what else the checkpoint holds, at least "step" and "run_id"; taken as it is now.
        """
        assert self._flight is None, "a save is in flight: finish() comes first"
        final = self._run_dir.checkpoints / checkpoints.folder_name(state["step"])
        whole = {**state, "version": VERSION, "state_files": self._ranks.num_ranks, "shapes": engine.shapes()}
        flight = PendingSave(final, json.loads(json.dumps(whole)), time.monotonic())
        flight.was_there = self._ranks.broadcast_object(
            _is_there(final, flight.state) if self._ranks.is_rank_zero else None
        )
        self._flight = flight
        if not flight.was_there:
            self._progress(f"copying the state for checkpoint {final.name}")
            self._snapshot.take(engine.fragments())
            flight.needed_bytes = sum(self._ranks.all_gather_object(self._snapshot.num_bytes))
            self._attempt(flight)

    def complete(self, values: Mapping[str, Any]) -> None:
        """Replaces values of the state given to `begin`: what was not known yet (not collective)."""
        assert self._flight is not None, "no save is in flight"
        self._flight.state |= json.loads(json.dumps(values))

    def is_writing(self) -> bool:
        """Whether this rank's file is not on disk yet."""
        return self._flight is not None and self._flight.writer is not None and self._flight.writer.is_alive()

    def finish(self) -> Saved | None:
        """Waits for the files of all ranks and commits them (collective). None: nothing was in flight.

        A save that fails is tried again from the same copy, SAVE_ATTEMPTS times in all, then given up.
        """
        if (flight := self._flight) is None:
            return None
        problem = None if flight.was_there else self._confirm(flight)
        for attempt in range(2, SAVE_ATTEMPTS + 1):
            if problem is None:
                break
            if self._ranks.is_rank_zero:
                log.warning("%s: %s; attempt %d of %d follows", flight.final.name, problem, attempt, SAVE_ATTEMPTS)
            time.sleep(SECONDS_BETWEEN_ATTEMPTS)
            self._attempt(flight)
            problem = self._confirm(flight)
        self._flight = None
        step, seconds = int(flight.state["step"]), time.monotonic() - flight.began
        if problem is not None:
            return Saved(step, None, self._give_up(flight, problem), seconds)
        return Saved(step, flight.final, None, seconds, flight.was_there)

    def _attempt(self, flight: "PendingSave") -> None:
        """An empty folder, and this rank's thread that writes into it (collective)."""
        problem = _prepare(flight.temporary, flight.needed_bytes) if self._ranks.is_rank_zero else None
        flight.problem = self._ranks.broadcast_object(problem)
        flight.writer = None
        if flight.problem is None:
            path = flight.temporary / file_name(self._ranks.rank)
            flight.writer = _Writer(path, self._snapshot.fragments, self._snapshot.starts)
            flight.writer.start()

    def _confirm(self, flight: "PendingSave") -> str | None:
        """Waits for every rank's file and commits; what went wrong, the same on every rank (collective)."""
        if flight.problem is not None:
            return flight.problem
        writer = flight.writer
        assert writer is not None  # made with the preparation
        self._wait(writer, f"writing checkpoint {flight.final.name}")
        results = self._ranks.all_gather_object(writer.result())
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(results) if problem is not None]
        if problems:
            return "; ".join(problems[:3])
        self._progress(f"committing checkpoint {flight.final.name}")
        entries = {file_name(rank): entry for rank, (entry, _) in enumerate(results)}
        problem: str | None = self._ranks.broadcast_object(
            _commit(flight, entries) if self._ranks.is_rank_zero else None
        )
        self._progress(f"after checkpoint {flight.final.name}")
        return problem

    def _wait(self, writer: "_Writer", doing: str) -> None:
        """Until no rank writes (collective). What moved on any rank is progress on all: the others wait for it."""
        self._progress(doing)
        before = self._ranks.all_gather_object(writer.standing())
        while any(is_alive for is_alive, _, _ in before):
            writer.join(LOOK_SECONDS)
            now = self._ranks.all_gather_object(writer.standing())
            if now != before:
                self._progress(doing)
            before = now

    def _give_up(self, flight: "PendingSave", problem: str) -> str:
        """Removes what was written; what people are told (collective)."""
        message = None
        if self._ranks.is_rank_zero:
            shutil.rmtree(flight.temporary, ignore_errors=True)
            whole = checkpoints.saved(self._run_dir)
            kept = f"the run can go on from {whole[-1].name}" if whole else "there is no earlier checkpoint"
            message = (
                f"{problem} (attempts: {SAVE_ATTEMPTS}); {kept}. Free space or mend the filesystem of "
                f"{self._run_dir.checkpoints}"
            )
        return str(self._ranks.broadcast_object(message))


@dataclass
class PendingSave:
    """A save between `begin` and `finish`."""

    final: Path
    state: dict[str, Any]
    began: float
    was_there: bool = False
    needed_bytes: int = 0
    problem: str | None = None
    """Of the preparation: nothing is written."""
    writer: "_Writer | None" = None

    @property
    def temporary(self) -> Path:
        return self.final.with_name(self.final.name + ".tmp")


class StagingBuffer:
    """A copy of this rank's fragments, in memory that is allocated once."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)
        self.fragments: dict[str, Tensor] = {}
        self.starts: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of the file that holds it, at most."""
        return sum(values.nbytes + HEADER_BYTES + len(key.encode()) for key, values in self.fragments.items())

    def take(self, fragments: "list[Fragment]") -> None:
        """Copies; pinned memory and one wait at the end where the state is on a GPU."""
        keys = [fragment.key for fragment in fragments]
        assert len(set(keys)) == len(keys), "a rank holds one fragment of a tensor"
        sizes = [fragment.values.numel() for fragment in fragments]
        if sum(sizes) != self._buffer.numel():
            is_on_gpu = any(fragment.values.is_cuda for fragment in fragments)
            # In one piece: pinned memory is handed out in powers of two.
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
    """Writes one rank's file. A daemon: a disk that stalls must not keep the process from ending."""

    def __init__(self, path: Path, fragments: Mapping[str, Tensor], starts: Mapping[str, int]) -> None:
        super().__init__(name=f"writes {path.name}", daemon=True)
        self._path, self._fragments, self._starts = path, fragments, starts
        self._stages_done = 0
        self._entry: dict[str, Any] | None = None
        self._problem: str | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            write_state_file(self._path, self._fragments, self._starts)
            self._stages_done = 1
            flush_to_disk(self._path)
            self._stages_done = 2
            self._entry = file_entry(self._path)
        except (OSError, SafetensorError, MemoryError) as error:
            self._problem = f"{self._path.name}: {error}"
        except BaseException as error:  # noqa: BLE001  (raised again by `result`, in the thread that can tell of it)
            self._error = error

    def standing(self) -> tuple[bool, int, int]:
        """Whether it still runs, and two numbers that change only when it moves."""
        is_alive = self.is_alive()
        blocks = 0
        if is_alive and not self._stages_done:
            try:  # safetensors writes under a hidden name first, at its full length: only the blocks grow
                blocks = sum(path.stat().st_blocks for path in self._path.parent.iterdir())
            except OSError:
                blocks = -1  # one was renamed in between
        return is_alive, self._stages_done, blocks

    def result(self) -> tuple[dict[str, Any] | None, str | None]:
        """The file's manifest entry, or what went wrong with the disk; after its end. Other errors are raised."""
        if self._error is not None:
            raise self._error
        return self._entry, self._problem


def _is_there(final: Path, state: Mapping[str, Any]) -> bool:
    """Whether an earlier start of this run has written this checkpoint; that start's or this one's load verified it."""
    try:
        manifest = checkpoints.read_file(final / MANIFEST)
        return bool((manifest["step"], manifest.get("run_id")) == (state["step"], state.get("run_id")))
    except (OSError, MachineError, ValueError, KeyError, TypeError):
        return False


def _prepare(temporary: Path, needed_bytes: int) -> str | None:
    """An empty folder on a disk with enough space, or what is in the way of that."""
    try:
        # Made anew where a disk was mounted, the run folder would lie below it, on another disk.
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


def _commit(flight: PendingSave, entries: dict[str, Any]) -> str | None:
    """Makes the folder a checkpoint: rank 0, when every rank's file is on disk."""
    temporary, final, state = flight.temporary, flight.final, flight.state
    try:
        write_json(temporary / STATE, state)
        StateFiles(temporary)  # sees all ranks' files, and their fragments tile the tensors
        files = {**entries, STATE: file_entry(temporary / STATE)}
        identity = {"version": VERSION, "step": state["step"], "run_id": state.get("run_id")}
        write_json(temporary / MANIFEST, {**identity, "files": files})
        if final.exists():  # not this run's, or torn: `begin` looked
            checkpoints.set_aside(final, "damaged")
        temporary.rename(final)
        flush_to_disk(final.parent)
    except CheckpointError as error:
        return f"{error}. Is the run folder on a disk that all nodes share?"
    except OSError as error:
        return str(error)
    try:
        write_text(final.parent / "latest", final.name + "\n")  # for people and scripts; we look for ourselves
    except OSError as error:
        log.warning("%s could not be named in `latest`: %s", final.name, error)
    return None
