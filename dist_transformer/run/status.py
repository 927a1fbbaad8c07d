"""Status of a run, read from its files while it works; changes nothing, and needs no Slurm."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from dist_transformer.config.credentials import without_credentials
from dist_transformer.config.loading import load_config
from dist_transformer.errors import UserError
from dist_transformer.files import modified, read_json
from dist_transformer.run.attempts import attempts, newest_checkpoint
from dist_transformer.run.excluded_nodes import excluded_nodes
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record, records_of_training, sound

SILENT_SECONDS = 60
"""Age of the heartbeat, updated every 5 seconds, above which the run counts as dead or its disk as away."""

SPEED_RECORDS = 50
"""Maximum number of the newest records that the speed is computed from."""


@dataclass(frozen=True)
class RunView:
    """Status of a run at one time. Times are unix seconds; None or {}: the run has not written it (yet).

    Attributes:
        state: state in run.json: starting, running, stopped, finished, failed; or pending while its job waits.
        newest: the newest record of training in metrics.jsonl.
        seconds_to_last_step: at the speed of the newest records.
        set_aside: names of checkpoints that were damaged, or that diverged.
        owner: the process that trains: host, pid, job; its heartbeat is `heartbeat_time`.
        last_end: record of the end of the newest attempt that has ended.
    """

    run_dir: RunDir
    state: str | None
    step: int
    max_steps: int | None
    starts: int
    newest: dict[str, Any]
    seconds_to_last_step: float | None
    checkpoint: str | None
    checkpoint_time: float | None
    set_aside: list[str]
    owner: dict[str, Any]
    heartbeat_time: float | None
    last_end: dict[str, Any]
    excluded: dict[str, str]
    divergences: list[dict[str, Any]]
    mlflow_run_id: str | None
    mlflow_uri: str | None

    def is_alive(self, now: float) -> bool:
        """True if the heartbeat is at most SILENT_SECONDS from now: clocks differ, and have been wrong."""
        return self.heartbeat_time is not None and abs(now - self.heartbeat_time) <= SILENT_SECONDS


def look_at(run_dir: RunDir) -> RunView:
    """Reads the status of a run from its files. Skips entries that are damaged or being written."""
    run, owner = read_record(run_dir.state), read_record(run_dir.owner)
    tracking, max_steps = read_record(run_dir.tracking), _max_steps(run_dir)
    began = float(owner.get("started", 0.0))
    records = [*islice(records_of_training(run_dir.metrics), SPEED_RECORDS)]
    newest = next(iter(records), {})
    step = max(int(run.get("step", 0)), int(newest.get("step", 0)))
    checkpoint = None
    with suppress(OSError):  # a folder without permission to read
        checkpoint = newest_checkpoint(run_dir)
    return RunView(
        run_dir=run_dir,
        state=run.get("state"),
        step=step,
        max_steps=max_steps,
        starts=int(run.get("starts", 0)),
        newest=newest,
        seconds_to_last_step=_seconds_to_end([r for r in records if r["time"] >= began], step, max_steps),
        checkpoint=checkpoint,
        checkpoint_time=_mtime(run_dir.checkpoints / checkpoint) if checkpoint else None,
        set_aside=_set_aside(run_dir),
        owner=owner,
        heartbeat_time=_mtime(run_dir.owner) if owner else None,
        last_end=next((r for r in reversed([*attempts(run_dir)]) if r.get("event") == "ended"), {}),
        excluded=excluded_nodes(run_dir),
        divergences=_divergences(run_dir),
        mlflow_run_id=tracking.get("run_id"),
        mlflow_uri=without_credentials(tracking["uri"]) if tracking.get("uri") else None,
    )


def _seconds_to_end(records: Sequence[dict[str, Any]], step: int, max_steps: int | None) -> float | None:
    """Estimates the time to the last step; the speed includes pauses, a single long one as ten usual intervals."""
    pairs = [(a, b) for a, b in pairwise(records) if a["time"] >= b["time"]]  # the clock of another node may be behind
    steps = sum(a["step"] - b["step"] for a, b in pairs)
    if steps <= 0 or max_steps is None:
        return None
    gaps = sorted(a["time"] - b["time"] - a.get("stop_seconds", 0.0) for a, b in pairs)
    gaps[-1] = min(gaps[-1], max(gaps[-2:][0], 10 * gaps[len(gaps) // 2]))
    return float((max_steps - step) * sum(gaps) / steps)


def _mtime(path: Path) -> float | None:
    """Modification time by this machine's clock, by which ages are computed; None if the file was removed meanwhile."""
    with suppress(OSError):
        return modified(path)
    return None


def _set_aside(run_dir: RunDir) -> list[str]:
    with suppress(OSError):
        names = [path.name for path in run_dir.checkpoints.iterdir()]
        return sorted(name for name in names if re.fullmatch(r"step_\d+\.(damaged|diverged)", name))
    return []


def _max_steps(run_dir: RunDir) -> int | None:
    """Searches config.yaml as `to_yaml` writes it: to read all settings of many runs would take a list seconds."""
    try:
        text = run_dir.config.read_text(encoding="utf-8")
        if found := re.search(r"^training:\n(?: .*\n)*?  max_steps: (\d+|null)$", text, re.MULTILINE):
            return int(found[1])
        return load_config(run_dir.config, check_files=False).training.max_steps
    except (OSError, ValueError, UserError):
        return None


def _divergences(run_dir: RunDir) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        events = read_json(run_dir.divergence)
        return [sound(event) for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    return []
