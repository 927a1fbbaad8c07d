"""Outbox of events for MLflow in the run folder, their content, and the state of their delivery.

tracking_events.jsonl  the outbox: one line for each start, checkpoint, final model and change of status, in order.
                       Points are not here: metrics.jsonl holds them.
tracking.json          the delivery state: run and server, the newest step sent of each event, the number of delivered
                       bytes of the outbox. It is replaced after each successful delivery: after a crash in between
                       some events are sent twice, as exact repeats, which MLflow drops.

An event is sent over one or more channels: the start's configuration file goes over another channel than its tags. Each
channel is in order and has its own offset, so that quick events do not wait for slow ones.
"""

import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from dist_transformer.errors import DistTransformerError
from dist_transformer.files import write_json

logger = logging.getLogger(__name__)

PROMPT_CHANNELS = ("status", "words", "files")
CHANNELS = (*PROMPT_CHANNELS, "figures", "model")
"""Channels by priority; those that are not prompt wait for the end of a start, after its status."""
POINTS_A_BATCH = 900
"""Points per request, after which tracking.json records the delivery; MLflow accepts 1,000."""
UPLOAD_MEGABYTES = 2000
"""Largest model folder that is uploaded (a model of 500 million weights); of a larger one MLflow has path and digest."""

Bytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Point:
    """One value of one curve; `time_ms` is unix time in milliseconds."""

    key: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class Model:
    """A model folder to be sent to MLflow. `upload`: a folder that does not exist yet, for the copy in MLflow's format;
    `decoding`: the settings it translates with; `register_as`: None for none.
    """

    folder: Path
    sha256: str
    step: int
    upload: Path
    decoding: Mapping[str, Any] = field(default_factory=dict)
    register_as: str | None = None
    alias: str | None = None
    by_hand: bool = False
    """True if requested by a user: the alias is set even if this version had it before."""


@dataclass(frozen=True)
class Target:
    """Destination: the server's address, the experiment's name, and the artifact folder of a store without a server."""

    uri: str
    experiment: str
    artifact_root: Path


class ServerTrouble(DistTransformerError):
    """The server did not accept a request. The message is the server's answer, without credentials."""


class FolderTrouble(ServerTrouble):
    """The run folder cannot be read or written. The message has the error of its disk; the server may be fine."""


class ServerRefused(ServerTrouble):
    """The server understood the request and will never accept it."""


class CannotBeSent(ServerRefused):
    """The data to be sent is gone or broken on our side, or of a kind that the server does not know: not tried again."""


class NotValid(ServerRefused):
    """A part of the request breaks the server's rules; the other parts may be accepted."""


@dataclass
class DeliveryState:
    """Content of tracking.json. The outbox is delivered up to byte `outbox_offset`; a channel may be `ahead` of it.

    `run_id` is of this program, stored in checkpoints too. In the file it is `run_uid`, and MLflow's id is `run_id`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    run_name: str
    run_id: Annotated[str, Field(alias="run_uid")] = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    uri: str | None = None
    mlflow_run_id: Annotated[str | None, Field(alias="run_id")] = None
    sent: dict[str, int] = field(default_factory=dict)
    outbox_offset: Annotated[Bytes, Field(alias="spool_offset")] = 0
    ahead: dict[str, Bytes] = field(default_factory=dict)

    def offset(self, channel: str) -> int:
        """Byte of the outbox before which all events of channel `channel` are delivered."""
        return self.outbox_offset + self.ahead.get(channel, 0)

    def advance(self, channel: str, offset: int) -> None:
        offsets = {each: self.offset(each) for each in CHANNELS} | {channel: offset}
        self.outbox_offset = least = min(offsets.values())
        self.ahead = {each: offset - least for each, offset in offsets.items() if offset > least}

    def is_followed_elsewhere(self, address: str) -> bool:
        """True if the run began at another address; a missing sqlite file counts as moved together with its runs."""
        if self.uri in (None, address):
            return False
        old, new = (Path(uri.removeprefix("sqlite:///")) for uri in (str(self.uri), address))
        are_files = old.is_absolute() and new.is_absolute() and old.name == new.name
        return not (are_files and new.is_file() and not old.exists())

    def save(self, path: Path) -> None:
        write_json(path, _ADAPTER.dump_python(self, by_alias=True))


_ADAPTER = TypeAdapter(DeliveryState)  # made once, since a state is saved after every delivery


def load_delivery_state(path: Path, run_name: str, run_id: str | None = None) -> DeliveryState:
    """The delivery state in this file; if none is usable, a new one of this run, not yet written."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        why = f"{error}".replace("\n", " ")[:200]
        logger.warning("%s: cannot be used, so delivery begins again; MLflow keeps each point once: %s", path, why)
    return DeliveryState(run_name) if run_id is None else DeliveryState(run_name, run_id)


@contextmanager
def local_files_refused(ours: Path | None = None) -> Iterator[None]:
    """Context in which a missing or closed local file raises CannotBeSent, because waiting would not help. One that is closed
    to this user at or below `ours` may be open to another user of the run: FolderTrouble, so that its event waits."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CannotBeSent(f"{type(error).__name__}: {error}") from None
    except PermissionError as error:
        is_ours = ours is not None and Path(os.fsdecode(error.filename or "")).is_relative_to(ours)
        raise (FolderTrouble if is_ours else CannotBeSent)(f"{type(error).__name__}: {error}") from None


def megabytes_of(folder: Path) -> float:
    """Size of all files below `folder`, in units of 2**20 bytes. Raises as `files_of`."""
    return sum(file.stat().st_size for file in files_of(folder)) / 2**20


def files_of(folder: Path) -> list[Path]:
    """All files below `folder`, sorted. Raises FileNotFoundError if it is no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there any more")
    return sorted(path for path in folder.rglob("*") if path.is_file())
