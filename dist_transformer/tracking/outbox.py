"""What waits in the run folder to be told to MLflow, and what has arrived there already.

tracking_events.jsonl  one line for each start, checkpoint, final model and change of status, in order. Points are not
                       here: metrics.jsonl holds them.
tracking.json          the memory: which run on which server, the newest step sent of each event, how many bytes of the
                       spool have arrived. It is replaced after a delivery succeeded: a crash in between delivers
                       some things twice, and those are exact repeats, which MLflow drops.

An event goes to the server by one lane or by two: the start's configuration file is for another lane than its tags.
Each lane is in order and remembers how far it came, so that what is quick does not wait for what is slow.
"""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from dist_transformer.errors import DistTransformerError
from dist_transformer.files import write_json
from dist_transformer.run.metrics_log import encode, remove_torn_line

logger = logging.getLogger(__name__)

PROMPT_LANES = ("words", "files")
CHANNELS = (*PROMPT_LANES, "figures", "model")
"""The first that has something goes first; those that are not prompt wait for the end of a start, after its status."""

Bytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Target:
    """Where to: the server's address, the experiment's name, and where a store without a server keeps artifacts."""

    uri: str
    experiment: str
    artifact_root: Path


class ServerTrouble(DistTransformerError):
    """The server did not take what was sent. The message is the server's answer, without credentials."""


class ServerRefused(ServerTrouble):
    """The server understood the request and will not take it, now or later."""


class CannotBeSent(ServerRefused):
    """What is to be sent is gone or broken on our side: no server was asked, and none would help."""


class NotValid(ServerRefused):
    """Something that was sent breaks the server's rules; what else was sent with it may do."""


@dataclass
class DeliveryState:
    """The content of tracking.json. Before byte `spool_offset` of the spool all has arrived; a lane may be `ahead`."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    run_name: str
    run_uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    uri: str | None = None
    run_id: str | None = None
    sent: dict[str, int] = field(default_factory=dict)
    spool_offset: Bytes = 0
    ahead: dict[str, Bytes] = field(default_factory=dict)

    def offset(self, lane: str) -> int:
        """Before this byte of the spool all that goes by `lane` has arrived."""
        return self.spool_offset + self.ahead.get(lane, 0)

    def advance(self, lane: str, offset: int) -> None:
        offsets = {each: self.offset(each) for each in CHANNELS} | {lane: offset}
        self.spool_offset = min(offsets.values())
        self.ahead = {
            each: offset - self.spool_offset for each, offset in offsets.items() if offset > self.spool_offset
        }

    def is_followed_elsewhere(self, address: str) -> bool:
        """Whether the run was begun at another address; a sqlite file that is gone was moved together with its runs."""
        if self.uri in (None, address):
            return False
        old, new = (Path(uri.removeprefix("sqlite:///")) for uri in (str(self.uri), address))
        was_moved = (
            new.is_absolute() and new.is_file() and old.is_absolute() and not old.exists() and old.name == new.name
        )
        return not was_moved

    def forget_server(self) -> None:
        """Nothing has arrived: the whole history will be sent."""
        self.run_id, self.sent, self.spool_offset, self.ahead = None, {}, 0, {}

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))


def load_memory(path: Path, run_name: str, run_uid: str | None = None) -> DeliveryState:
    """The memory of this run folder; where there is none that can be used, a new one, not yet written, of this run."""
    try:
        return TypeAdapter(DeliveryState).validate_json(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        why = f"{error}".replace("\n", " ")[:200]
        logger.warning("%s: cannot be used, so delivery begins again; MLflow keeps each point once: %s", path, why)
    return DeliveryState(run_name) if run_uid is None else DeliveryState(run_name, run_uid)


def add_event(path: Path, event: str, details: Mapping[str, Any]) -> None:
    """Append one event to the spool. Raises OSError when the disk does not take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_torn_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(encode({"event": event, "time": round(time.time(), 3), **details}))


@contextmanager
def local_files_refused() -> Iterator[None]:
    """A local file that is gone or forbidden is no outage: CannotBeSent, because waiting does not help."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise CannotBeSent(f"{type(error).__name__}: {error}") from None
