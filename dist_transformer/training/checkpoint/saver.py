"""Checkpoints of one start: each step is saved once, at most one save is in flight, a failed last one ends the run."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.errors import MachineError
from dist_transformer.training.checkpoint.async_writer import AsyncWriter

if TYPE_CHECKING:  # the engine is only passed in; importing it here would import DeepSpeed
    from dist_transformer.training.engine.engine import Engine

log = logging.getLogger(__name__)


class CheckpointSaver:
    """Begins and ends saves.

    Args:
        flush: called before a checkpoint becomes complete: brings the records that it continues onto the disk.
        saved: called with step, folder and seconds of writing of each checkpoint that this start wrote, when it is complete;
            on every rank.
        stood_still: called with the seconds that training waited.
    """

    def __init__(
        self,
        writer: AsyncWriter,
        engine: "Engine",
        flush: Callable[[], None],
        saved: Callable[[int, Path, float], None],
        stood_still: Callable[[float], None],
    ) -> None:
        self._writer, self._engine = writer, engine
        self._flush, self._saved, self._stood_still = flush, saved, stood_still
        self._begun = self._done = -1  # steps

    @property
    def step_in_flight(self) -> int | None:
        """Step of the save that has begun and not ended."""
        return self._begun if self._begun > self._done else None

    def is_writing(self) -> bool:
        """True while this rank's file is not on disk."""
        return self._writer.is_writing()

    def save(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Begins a checkpoint of this step, unless there is one; `state` is called then (collective)."""
        if self._begun == step:
            return
        self.finish()
        started = time.monotonic()
        self._writer.begin(self._engine, state())
        self._begun = step
        self._stood_still(time.monotonic() - started)

    def save_last(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Saves this step and waits for the end of it (collective). Raises MachineError: on every rank: the checkpoint
        could not be saved."""
        self.save(step, state)
        if self._done != step:
            self._finish(is_last=True)

    def complete(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds values to the save of this step, if it is in flight: those of a validation that ended after it began."""
        if self.step_in_flight == step:
            self._writer.complete(values)

    def finish(self) -> None:
        """Waits for the save in flight, commits it or reports why not (collective); nothing without one."""
        if self.step_in_flight is not None:
            self._finish(is_last=False)

    def _finish(self, is_last: bool) -> None:
        started, step = time.monotonic(), self._begun
        self._flush()
        saved = self._writer.finish()
        if saved.problem is not None:
            self._begun = self._done
            message = f"checkpoint of step {step} was given up: {saved.problem}"
            if is_last:
                raise MachineError(message).agreed()
            log.error("save       %s; training continues, and tries again at the next one", message)
        else:
            self._done = self._begun
            if not saved.was_there:
                self._saved(step, saved.path, saved.seconds)
                log.info("step %7d  saved %s in %.1f s", step, saved.path.name, saved.seconds)
        self._stood_still(time.monotonic() - started)
