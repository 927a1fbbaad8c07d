"""Sends metrics.jsonl and the outbox of a run folder to MLflow, in order and with retries.

The status is sent first, then text (tags, checkpoints), then files; figures and the model wait for the end of a start. One
pass of `Shipper.deliver` sends everything present. `BackgroundShipper` repeats the passes in a daemon thread: every
POLL_SECONDS while the server answers, after 1, 2, 4 ... 60 seconds while it does not. Training never waits for it.
"""

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from dist_transformer.config.credentials import without_credentials, without_secrets
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records, read_records_from
from dist_transformer.tracking import outbox
from dist_transformer.tracking.messages import OVERRIDDEN, REPLACED, STATUSES, goes_by, points_of, send_event

if TYPE_CHECKING:
    from dist_transformer.tracking.mlflow_client import TrackedRun

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
PREDECESSOR_SECONDS = 15.0
"""Wait for an abandoned thread, whose hanging request times out after 10 seconds."""
ANSWER_SECONDS = 10.0
"""Time after a delivery in which a closing shipper expects the next one: a request times out after it."""


@dataclass(frozen=True)
class Delivery:
    """Counts of one pass' deliveries."""

    run_id: str
    points: int
    events: int


class Abandoned(Exception):
    """Ends a shipper that nobody waits for any more, because another one may take over its delivery."""


class Shipper:
    """Delivers one run folder to one server and records the progress in tracking.json.

    Once `abandoned` is set it sends nothing more and leaves tracking.json alone.
    """

    def __init__(self, run_dir: RunDir, target: outbox.Target, state: outbox.DeliveryState) -> None:
        self.folder, self._run_dir = run_dir.path, run_dir
        self._target, self._state = target, state
        self._run: TrackedRun | None = None
        self._offset = 0
        self._file: BinaryIO | None = None
        self._refused: tuple[str, int] | None = None
        self._left_out: set[str] = set()
        self.abandoned = threading.Event()
        self.newest_delivery = -math.inf  # by time.monotonic()

    def deliver(self, channels: Sequence[str] = outbox.CHANNELS) -> Delivery:
        """Runs one pass. Raises ServerTrouble; earlier deliveries are recorded, the rest is sent by the next pass.

        Also raises Abandoned, and FolderTrouble if the run folder cannot be read or written.
        """
        try:
            run = self._run = self._run or self._open_run()
            return self._deliver_to(run, channels)
        except (outbox.ServerTrouble, OSError) as trouble:
            self._run = None  # the next pass opens the run anew: it may have been deleted meanwhile
            if isinstance(trouble, outbox.ServerTrouble):
                raise
            raise outbox.FolderTrouble(f"the run folder cannot be read or written: {trouble}") from trouble

    def deliver_all(self) -> Delivery:
        """As `deliver`; then asks for every point, and sends what an old backup, restored amid training, does not have."""
        sent = self.deliver()
        run = self._run or self._open_run()
        records = read_records(self._run_dir.metrics)
        lost = run.lost(p for each in records if {"step", "time"} <= each.keys() for p in points_of(each))
        if not lost:
            return sent
        logger.warning("MLflow run %s lacks %d points (an old backup?): all is sent again", run.run_id, len(lost))
        self._state.outbox_offset, self._state.ahead = 0, {}
        events = sent.events + self.deliver().events
        run.log_all_points(lost)  # last: what is broken off before is found again
        return Delivery(run.run_id, sent.points + len(lost), events)

    def _deliver_to(self, run: "TrackedRun", channels: Sequence[str]) -> Delivery:
        began, points = self._state.outbox_offset, 0
        arrived: set[int] = set()
        trouble: outbox.FolderTrouble | None = None
        while (found := self._next_event(channels)) is not None:
            channel, event, end = found
            if channel != "words":
                points += self._send_points(run)  # sent before the end of the run and before any upload
            try:
                self._send_event(run, self._without_overridden(event, end), channel)
            except outbox.FolderTrouble as waits:  # a file is closed to this user: its channel waits, others go on
                trouble, channels = waits, [each for each in channels if each != channel]
                continue
            except outbox.ServerTrouble:
                self._send_points(run)  # an event that must wait does not delay the curves
                raise
            self._state.advance(channel, end)
            self.newest_delivery = time.monotonic()
            self._save()
            arrived.add(end)
        if self._state.outbox_offset != began:
            self._save()
        points += self._send_points(run)
        if trouble is not None:
            raise trouble
        return Delivery(run.run_id, points, len(arrived))

    def _next_event(self, channels: Sequence[str]) -> tuple[str, dict[str, Any], int] | None:
        """Channel, event and the offset after it. Searched anew each time: text may have been added meanwhile."""
        for channel in outbox.CHANNELS:
            for event, end in read_records_from(self._run_dir.tracking_events, self._state.offset(channel)):
                if not goes_by(event, channel) or self._is_replaced(event, channel, end):
                    self._state.advance(channel, end)
                elif channel in channels:
                    return channel, event, end
                else:
                    break
        return None

    def _is_replaced(self, event: dict[str, Any], channel: str, end: int) -> bool:
        """True if a later event that waits says all of this one: a status, or a file that is sent as it is by then."""
        if channel == "status":
            later = read_records_from(self._run_dir.tracking_events, end, ("start", "status"))
            return any(each.get("status", "RUNNING") in STATUSES for each, _ in later)
        return event["event"] in REPLACED and any(self._later(event, end))

    def _later(self, event: dict[str, Any], end: int) -> Iterator[dict[str, Any]]:
        """Yields the events of the same kind after byte `end` that lack none of its values."""
        later = read_records_from(self._run_dir.tracking_events, end, (event["event"],))
        return (each for each, _ in later if each.keys() >= event.keys())

    def _without_overridden(self, event: dict[str, Any], end: int) -> dict[str, Any]:
        """Returns an event without what a later one will say in its place."""
        said = {key for key in OVERRIDDEN if not event.get(key) or any(each[key] for each in self._later(event, end))}
        return {key: value for key, value in event.items() if key not in said}

    def _save(self) -> None:
        self._end_if_abandoned()
        self._state.save(self._run_dir.tracking)

    def _end_if_abandoned(self) -> None:
        if self.abandoned.is_set():
            raise Abandoned

    def _open_run(self) -> "TrackedRun":
        # Imported here, in the thread: it takes 2 seconds, which commands without tracking do not spend.
        from dist_transformer.tracking import mlflow_client

        state, address = self._state, without_credentials(self._target.uri)
        moves = state.is_followed_elsewhere(address)
        self._save()  # saves the tag's value by which the run is found, before the run can exist
        run = mlflow_client.open_run(self._target, replace(state, mlflow_run_id=None) if moves else state)
        if moves:  # only after the new address has answered: it may be a mistake
            logger.warning("tracking moves from %s to %s: the whole history is sent there", state.uri, address)
        state.uri = address
        if moves or run.run_id != state.mlflow_run_id:
            logger.info("MLflow run %s in experiment %r at %s", run.run_id, self._target.experiment, address)
            self._begin_again(run)
        elif any(run.newest_step(event) < step for event, step in state.sent.items()):
            logger.warning("MLflow run %s lost points (an old backup?): the whole history is sent there", run.run_id)
            self._begin_again(run)
        self._save()
        return run

    def _begin_again(self, run: "TrackedRun") -> None:
        state, self._offset = self._state, 0
        state.mlflow_run_id, state.sent, state.outbox_offset, state.ahead = run.run_id, {}, 0, {}

    def _send_points(self, run: "TrackedRun") -> int:
        """Sends the records after the newest step sent of their event, and returns the number of their points: on the
        server steps only grow."""
        self._start_over_if_replaced()
        count, end = 0, self._offset
        points, newest = list[outbox.Point](), dict(self._state.sent)
        for record, after in read_records_from(self._run_dir.metrics, self._offset):
            if {"step", "time"} <= record.keys() and record["step"] > newest.get(record["event"], -1):
                found = points_of(record)
                if points and len(points) + len(found) > outbox.POINTS_A_BATCH:
                    count += self._send_batch(run, points, newest, end)
                    points = []
                if found:
                    points += found
                    newest[record["event"]] = record["step"]
            end = after
        if points:
            count += self._send_batch(run, points, newest, end)
        self._offset = end
        return count

    def _send_batch(
        self, run: "TrackedRun", points: Sequence[outbox.Point], newest: Mapping[str, int], end: int
    ) -> int:
        self._end_if_abandoned()
        count = self._log_points(run, points)
        self._state.sent.update(newest)
        self.newest_delivery = time.monotonic()
        self._save()
        self._offset = end
        return count

    def _log_points(self, run: "TrackedRun", points: Sequence[outbox.Point]) -> int:
        """Logs points, and returns how many: of curves that the server refuses for good none, with one warning each."""
        points = [point for point in points if point.key not in self._left_out]
        try:
            run.log_points(points)
            return len(points)
        except outbox.NotValid as refusal:
            keys = {point.key for point in points}
            if len(keys) > 1:
                return sum(self._log_points(run, [each for each in points if each.key == key]) for key in sorted(keys))
            self._left_out |= keys
            logger.warning("MLflow refuses the curve %r, which is skipped: %s", points[0].key, refusal)
            return 0

    def _start_over_if_replaced(self) -> None:
        """Starts from offset 0 if a rewind replaced metrics.jsonl by a shorter file, for which old offsets are invalid.

        The old file is held open meanwhile, because otherwise the new one might get its inode number.
        """
        path = self._run_dir.metrics
        if self._file is not None:
            with suppress(OSError):  # a network disk that failed over may not know the old file any more
                if os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                    return
            stale, self._file = self._file, None
            with suppress(OSError):
                stale.close()
        self._file, self._offset = path.open("rb") if path.exists() else None, 0

    def _send_event(self, run: "TrackedRun", event: dict[str, Any], channel: str) -> None:
        """Sends an event; one refused twice, the second time on a newly opened run, is dropped: others wait for it."""
        self._end_if_abandoned()
        try:
            send_event(run, event, channel, self._run_dir)
            if event["event"] == "status":
                run.remove_doubles(self._state.run_id)
        except outbox.ServerRefused as refusal:
            self._end_if_abandoned()
            here = (channel, self._state.offset(channel))
            said = f"MLflow refused the event {event['event']!r}, which is skipped: {refusal}"
            is_known = said in self._left_out  # an older server refuses each checkpoint
            if not is_known and not isinstance(refusal, outbox.CannotBeSent) and self._refused != here:
                self._refused = here
                raise
            if not is_known:
                logger.warning("%s", said)
            self._left_out.add(said)


class BackgroundShipper:
    """Repeats `Shipper.deliver` in a daemon thread until closed. Errors are logged and never raised into training."""

    def __init__(self, shipper: Shipper) -> None:
        self._shipper = shipper
        self._closing = threading.Event()
        self._abandoned = shipper.abandoned
        self._thread = threading.Thread(target=self._run, name=f"tracking {shipper.folder.absolute()}", daemon=True)
        self._delivered_all = False
        self._newest_failure = -math.inf

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float, busy_seconds: float = 0.0, *, has_upload: bool = False) -> bool:
        """Tries until everything is delivered, for at most `seconds`; up to `busy_seconds` more while deliveries succeed.

        `has_upload`: an upload may take longer than ANSWER_SECONDS; while it does, only a failure ends the wait.
        Returns False if something is undelivered; it stays in the run folder.
        """
        self._closing.set()
        self._thread.join(timeout=seconds)
        deadline = time.monotonic() + busy_seconds
        while self._thread.is_alive() and time.monotonic() < deadline and self._is_answered(has_upload):
            self._thread.join(timeout=FIRST_WAIT_SECONDS)
        self._abandoned.set()
        return self._delivered_all

    def _is_answered(self, has_upload: bool) -> bool:
        delivered = self._shipper.newest_delivery
        return time.monotonic() - delivered < ANSWER_SECONDS or (has_upload and delivered >= self._newest_failure)

    def _run(self) -> None:
        try:
            # Waits for abandoned threads of this folder, whose last request must have ended before the run is opened.
            for thread in threading.enumerate():
                if thread.name == self._thread.name and thread is not self._thread:
                    thread.join(PREDECESSOR_SECONDS)
            self._deliver_until_closed()
        except Abandoned:
            return
        except Exception:  # noqa: BLE001 - the end of a thread: a bug in tracking is logged, and training continues
            report = without_secrets(traceback.format_exc())
            logger.error("tracking stopped by an error of ours; training and metrics.jsonl go on\n%s", report)

    def _deliver_until_closed(self) -> None:
        """One warning when the server stops answering, one line when it caught up, growing waits in between.

        A single failure is none: a connection that broke says nothing of what the server has.
        """
        wait_seconds = POLL_SECONDS
        failures: list[float] = []  # times of those since the last pass that delivered
        while not self._abandoned.is_set():
            closing = self._closing.is_set()  # read before the pass, so that it includes all events added until closing
            try:
                delivery = self._shipper.deliver(outbox.CHANNELS if closing else outbox.PROMPT_CHANNELS)
            except outbox.ServerTrouble as trouble:
                if self._abandoned.is_set():
                    return
                self._newest_failure = time.monotonic()
                wait_seconds = min(2 * wait_seconds, LONGEST_WAIT_SECONDS) if failures else FIRST_WAIT_SECONDS
                failures.append(self._newest_failure)
                if len(failures) == 2:
                    said = "MLflow takes no data; training continues and all is sent later. Its answer: %s"
                    logger.warning(said, trouble)
            else:
                if len(failures) > 1:
                    seconds = time.monotonic() - failures[0]
                    counts = f"{delivery.points} points, {delivery.events} events"
                    logger.warning("MLflow caught up after %.0f s: %s", seconds, counts)
                failures, wait_seconds = [], POLL_SECONDS
                self._delivered_all = closing
                if closing:
                    return
            # While closing, only abandonment may cut the wait short, and the server is tried each second.
            seconds = min(wait_seconds, FIRST_WAIT_SECONDS) if closing else wait_seconds
            (self._abandoned if closing else self._closing).wait(seconds)
