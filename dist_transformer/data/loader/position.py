"""Position of a run in its data, as small JSON in a checkpoint: a resume continues with the next micro-batch.

    {"version": 1, "epoch": 0, "segment": 0, "quotas": [600], "shares": null,
     "streams": [{"pending": [], "next_pass": 0}], "open": {}, "lanes": [[2, 5], [2, 4]], "quarantined": [],
     "left_out": []}

It does not depend on ranks or loader processes. `open` has, by lane, windows begun before the epoch was repartitioned.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from dist_transformer.data.loader.partition import OpenWindow, Partition
from dist_transformer.data.loader.window_request import RowSlice, WindowKey
from dist_transformer.errors import CheckpointError

POSITION_VERSION = 1


@dataclass(frozen=True)
class Quarantined:
    """A quarantined row group of a window, which is also built without it when it is built again."""

    key: WindowKey
    corpus: int
    row_group: int
    place: str
    reason: str


@dataclass(frozen=True)
class Position:
    """Current partition and, per lane, (window, micro-batches of it handed out)."""

    __pydantic_config__ = ConfigDict(strict=True, revalidate_instances="always")

    partition: Partition
    lanes: tuple[tuple[int, int], ...]
    quarantined: tuple[Quarantined, ...] = ()
    """Quarantined row groups of this epoch and the previous one, whose windows may be built again."""
    ever_quarantined: tuple[tuple[int, int], ...] = ()
    """(corpus, row group) of every row group that was ever quarantined."""

    @classmethod
    def start(cls, partition: Partition) -> "Position":
        """Returns the position at the start of a partition."""
        return cls(partition, tuple((0, windows[0].emitted if windows else 0) for windows in partition.open_windows))

    def with_quarantined(self, row_groups: Sequence[Quarantined]) -> "Position":
        """Returns this position with more quarantined row groups."""
        newest = max(entry.key.epoch for entry in row_groups)
        kept = (entry for entry in self.quarantined if entry.key.epoch >= newest - 1)
        ever_quarantined = {*self.ever_quarantined, *((entry.corpus, entry.row_group) for entry in row_groups)}
        return replace(self, quarantined=(*kept, *row_groups), ever_quarantined=tuple(sorted(ever_quarantined)))

    def to_json(self) -> dict[str, Any]:
        partition = self.partition
        opened = {str(lane): windows for lane, windows in enumerate(partition.open_windows) if windows}
        return {
            "version": POSITION_VERSION,
            "epoch": partition.epoch,
            "segment": partition.number,
            "quotas": list(partition.quotas),
            "shares": None if partition.shares is None else list(partition.shares),
            "streams": [asdict(stream) for stream in partition.streams],
            "open": {lane: [_open_to_json(window) for window in windows] for lane, windows in opened.items()},
            "lanes": [list(lane) for lane in self.lanes],
            "quarantined": [asdict(row_group) for row_group in self.quarantined],
            "left_out": [list(row_group) for row_group in self.ever_quarantined],
        }


def position_from_json(value: Mapping[str, Any], where: str) -> Position:
    """Reads the result of `to_json`; CheckpointError if another version wrote it. `where` is the name of the file."""
    if value.get("version") != POSITION_VERSION:
        raise CheckpointError(
            f"{where}: its data position has version {value.get('version')}, this program reads version "
            f"{POSITION_VERSION}. Resume with the version of dist-transformer that wrote it, or give the run another "
            "run.name."
        )
    try:
        return POSITION.validate_json(json.dumps(_nested(value)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error!r}".replace("\n", " ")[:300]
        raise CheckpointError(
            f"{where}: its data position is damaged ({why}); resume from another checkpoint"
        ) from error


def _nested(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `Position` from the result of `to_json`."""
    opened = {int(lane): [*map(_open_from_json, windows)] for lane, windows in value["open"].items()}
    partition = {
        **{name: value[name] for name in ("epoch", "quotas", "shares")},
        "streams": [{name: each[name] for name in ("pending", "next_pass")} for each in value["streams"]],
        "number": value["segment"],
        "open_windows": [opened.get(lane, []) for lane in range(len(value["lanes"]))],
    }
    same = {name: value[name] for name in ("lanes", "quarantined")}
    return {"partition": partition, **same, "ever_quarantined": value["left_out"]}


def _open_to_json(window: OpenWindow) -> dict[str, Any]:
    slices = [list(astuple(piece)) for piece in window.request.slices]
    return {"key": list(astuple(window.request.key)), "slices": slices, "emitted": window.emitted}


def _open_from_json(value: Mapping[str, Any]) -> dict[str, Any]:
    slices = [asdict(RowSlice(*piece)) for piece in value["slices"]]
    return {"request": {"key": asdict(WindowKey(*value["key"])), "slices": slices}, "emitted": value["emitted"]}


POSITION = TypeAdapter(Position)
