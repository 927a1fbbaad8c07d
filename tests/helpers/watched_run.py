"""Run folders as a run leaves them, for the tests of what watches."""

import json
import os
from pathlib import Path
from typing import Any

from dist_transformer.files import write_json, write_text
from dist_transformer.run.folder import RunDir

CONFIG = """
data: {{train: {{demo: train}}}}
run: {{name: {name}, root: {root}}}
schedule: {{warmup_steps: 9}}
training: {{max_steps: 1000}}
"""
NOW = 1_800_000_000.0


def make_run(path: Path, state: str | None = "running", job_id: str | None = None) -> RunDir:
    """A run folder with a configuration; `state`: of run.json."""
    run_dir = RunDir(path)
    write_text(run_dir.config, CONFIG.format(name=path.name, root=path.parent))
    if state is not None:
        write_json(run_dir.state, {"state": state, "step": 40, "starts": 2})
    if job_id is not None:
        write_json(run_dir.job, {"job_id": job_id, "submitted_at": "2027-01-01T00:00:00+00:00", "command": "sbatch"})
    return run_dir


def add_lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def trained(step: int, time: float, **values: Any) -> dict[str, Any]:
    """A record of metrics.jsonl."""
    return {"event": "train", "step": step, "time": time, "loss": 2.5, "learning_rate": 1e-3,
            "tokens_per_second": 900.0, **values}  # fmt: skip


def beat(run_dir: RunDir, at: float, started: float = 0.0, **who: Any) -> None:
    """owner.json with a heartbeat at this time."""
    write_json(run_dir.owner, {"host": "n1", "pid": 1, "job": "5", "started": started, **who})
    os.utime(run_dir.owner, (at, at))
