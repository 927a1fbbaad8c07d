"""Repeats the passes of a shipper in a daemon thread: every POLL_SECONDS while the server answers, after 1, 2, 4 ... 60
seconds while it does not. Training never waits for it."""

import logging
import threading
import time
import traceback

from dist_transformer.config.credentials import without_secrets
from dist_transformer.tracking.outbox import CHANNELS, PROMPT_CHANNELS, ServerTrouble
from dist_transformer.tracking.shipper import Abandoned, Shipper

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
PREDECESSOR_SECONDS = 15.0
"""Wait for an abandoned thread, whose hanging request times out after 10 seconds."""


class BackgroundShipper:
    """Repeats `Shipper.deliver` in a daemon thread until closed. Errors are logged and never raised into training."""

    def __init__(self, shipper: Shipper) -> None:
        self._shipper = shipper
        self._closing = threading.Event()
        self._abandoned = shipper.abandoned
        self._thread = threading.Thread(target=self._run, name=f"tracking {shipper.folder.absolute()}", daemon=True)
        self._delivered_all = False
        self._outage_began: float | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float, busy_seconds: float = 0.0) -> bool:
        """Tries until everything is delivered, for at most `seconds`; a server that answers gets `busy_seconds` more.

        Returns False if something is undelivered; it stays in the run folder.
        """
        self._closing.set()
        self._thread.join(timeout=seconds)
        deadline = time.monotonic() + busy_seconds
        while self._thread.is_alive() and self._outage_began is None and time.monotonic() < deadline:
            self._thread.join(timeout=FIRST_WAIT_SECONDS)
        self._abandoned.set()
        return self._delivered_all

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
        """One warning when the server stops answering, one line when it caught up, growing waits in between."""
        wait_seconds = POLL_SECONDS
        while not self._abandoned.is_set():
            closing = self._closing.is_set()  # read before the pass, so that it includes all events added until closing
            try:
                delivery = self._shipper.deliver(CHANNELS if closing else PROMPT_CHANNELS)
            except ServerTrouble as trouble:
                if self._abandoned.is_set():
                    return
                if self._outage_began is None:
                    self._outage_began, wait_seconds = time.monotonic(), FIRST_WAIT_SECONDS
                    said = "MLflow takes no data; training continues and all is sent later. Its answer: %s"
                    logger.warning(said, trouble)
                else:
                    wait_seconds = min(2 * wait_seconds, LONGEST_WAIT_SECONDS)
            else:
                if self._outage_began is not None:
                    seconds = time.monotonic() - self._outage_began
                    counts = f"{delivery.points} points, {delivery.events} events"
                    logger.warning("MLflow caught up after %.0f s: %s", seconds, counts)
                self._outage_began, wait_seconds = None, POLL_SECONDS
                self._delivered_all = closing
                if closing:
                    return
            # While closing, only abandonment may cut the wait short, and the server is tried each second.
            seconds = min(wait_seconds, FIRST_WAIT_SECONDS) if closing else wait_seconds
            (self._abandoned if closing else self._closing).wait(seconds)
