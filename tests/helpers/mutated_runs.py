"""Run folders whose files are damaged in every way that disks, people and other versions have, and the verbs asked of them."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dist_transformer.cluster import requeue
from dist_transformer.cluster.submit import note_job
from dist_transformer.files import write_json, write_text
from dist_transformer.run.excluded_nodes import exclude
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, add_event
from dist_transformer.tracking.outbox import DeliveryState

VALUES: list[Any] = [
    None,
    [],
    {},
    "text",
    "",
    -1,
    0,
    1.5,
    True,
    10**400,
    1e308,
    [1],
    {"a": 1},
    ["x"],
    "nan",
    [{}],
    [[]],
]
CONTENTS = [
    b"",
    b"[]",
    b"null",
    b"5",
    b'"text"',
    b"{}",
    b"[[1]]",
    b"{]",
    b"\xff\xfe\x00\x01garbage\n",
    b"[" * 100_000,
    b"\n\n",
]
BEGAN = 1_800_000_000.0

Mutation = tuple[str, Callable[[Path], None]]


def whole_file_mutations(path: Path) -> Iterator[Mutation]:
    """A file that is gone, cut, of another kind, or no file."""
    size = path.stat().st_size
    yield "removed", Path.unlink
    yield "a folder", _to_folder
    yield "a link to itself", _to_loop
    for number, content in enumerate(CONTENTS):
        yield f"content {number}", lambda file, content=content: file.write_bytes(content)
    for part in (0.3, 0.6, 0.9):
        yield f"cut at {part}", lambda file, part=part: file.write_bytes(file.read_bytes()[: int(size * part)])


def field_mutations(path: Path, draw: random.Random, num: int) -> Iterator[Mutation]:
    """Fields of other types, fields that are missing, records of another kind: of JSON, JSON lines and YAML."""
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return
    for number in range(num):
        yield f"field {number}", partial(_change_fields, seed=draw.random())


def _change_fields(file: Path, seed: float) -> None:
    draw = random.Random(seed)
    if file.suffix == ".yaml":
        file.write_text(yaml.safe_dump(changed(yaml.safe_load(file.read_text("utf-8")), draw)), encoding="utf-8")
        return
    lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text("utf-8")]
    chosen = range(len(lines)) if draw.random() < 0.3 else [draw.randrange(len(lines))] if lines else []
    same = draw.random()
    for place in chosen:
        lines[place] = json.dumps(changed(json.loads(lines[place]), random.Random(same)))
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def changed(value: Any, draw: random.Random) -> Any:
    """`value` with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw.choice(VALUES)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Torn, empty, or with a bit flipped, or with bytes put in, taken out or written over; often near its beginning or its
    end, where lengths and names stand."""
    at = min(
        draw.choice(
            [0, 1, 8, draw.randrange(1000), len(content) - 1 - draw.randrange(600), draw.randrange(len(content))]
        ),
        len(content) - 1,
    )
    at = max(at, 0)
    noise = draw.randbytes(draw.choice([1, 1, 8, 100]))
    kind = draw.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
    return content[:at] + (b"" if kind == 2 else noise) + content[at + (0 if kind == 3 else len(noise)) :]


def _to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _to_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def copy_of(run: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run, place, symlinks=True)
    return place


def write_run(run_dir: RunDir, config_text: str, job: str = "5") -> None:
    """A run that was stopped, with every file that one may have, by those that write them where they can be called."""
    write_text(run_dir.config, config_text)
    write_json(run_dir.state, {"run_id": "a1", "state": "stopped", "step": 6, "starts": 2, "num_ranks": 1, "host": "n1",
                               "slurm_job_id": job, "version": "0.1.0", "time": BEGAN + 60})  # fmt: skip
    metrics, samples, history = (MetricsLog(path) for path in (run_dir.metrics, run_dir.samples, run_dir.history))
    history.append("start", 0, {"num_ranks": 1, "nodes": ["n1"], "slurm_job_id": None, "restart": 0, "device": "cpu"})
    sentences = [{"number": 1, "fixed": True, "source": "a", "reference": "b", "translation": "c"},
                 {"number": 9, "fixed": False, "source": "d", "reference": "e", "translation": "f"}]  # fmt: skip
    for step in range(1, 7):
        metrics.append("train", step, {"loss": 9.0 / step, "learning_rate": 0.1, "tokens_per_second": 900.0, "epoch": 0,
                                       "save_seconds": 0.1, "batch_digest": "00ff", "target_tokens": 500})  # fmt: skip
        if step % 3 == 0:
            measures = {"loss": 9.5 / step, "nll": 8.0 / step, "bleu": float(step), "bleu_signature": "nrefs:1|tok:13a"}
            metrics.append("validation", step, measures | {"news/bleu": 1.0})
            samples.append("samples", step, {"corpus": "validation", "sentences": sentences})
            folder = run_dir.checkpoints / f"step_{step:08d}"
            write_json(folder / "state.json", {"version": 6, "step": step, "run_id": "a1", "num_ranks": 1, "batches": step,
                                               "validation": measures, "recipe": {"run.seed": 1, "data.lanes": 64},
                                               "early_stopping": {"metric": "loss", "best": 1.5, "best_step": 6}})  # fmt: skip
            write_json(folder / "manifest.json", {"version": 6, "step": step, "run_id": "a1", "files": {}})
            details = {"path": str(folder), "metrics": {"loss": 1.5}, "is_best": True, "kept": [folder.name]}
            add_event(run_dir.tracking_events, "checkpoint", {"step": step, **details})
    history.append("changed", 3, {"settings": {"validation.beam_size": [1, 4]}, "metric_begins_anew": True})
    history.append("end", 6, {"state": "stopped", "reason": "USR1"})
    write_json(run_dir.evaluation / "test.json", {"bleu": 31.2, "chrf": 55.5, "exact_match": 0.1, "pairs": 40,
                                                  "beam_size": 4, "bleu_signature": "nrefs:1|tok:13a"})  # fmt: skip
    write_json(run_dir.divergence, [{"since_step": 4, "went_on_from": 3, "reason": "the loss is nan", "policy": "stop",
                                     "learning_rate_factor": 1.0, "time": BEGAN}])  # fmt: skip
    write_json(
        run_dir.owner, {"host": "n1", "boot": "b", "pid": 1, "job": job, "attempt": 0, "token": "t", "started": BEGAN}
    )
    start = {"tags": {"a": "b"}, "parameters": {"run.seed": "1"}, "config": "run: {}\n", "description": "a run",
             "datasets": [{"name": "train", "context": "training", "digest": "00", "source": "/text", "rows": 6}]}  # fmt: skip
    add_event(run_dir.tracking_events, "start", start)
    scores = {"step": 6, "name": "test", "metrics": {"bleu": 31.2}}
    add_event(run_dir.tracking_events, "evaluation", scores)
    add_event(run_dir.tracking_events, "samples", {"step": 6})
    add_event(run_dir.tracking_events, "status", {"status": "SCHEDULED"})
    DeliveryState("a run", sent={"train": 2}).save(run_dir.tracking)
    run_dir.slurm.mkdir()
    note_job(run_dir, {"train": job}, "sbatch train.sbatch")
    requeue.begin(run_dir, job, 0)
    requeue.end(run_dir, job, 0, 75, "decide")
    exclude(run_dir, {"n7": "preflight: slow"}, 10, 2)
    write_text(run_dir.log, "2026-01-01 step 6\n" * 9)
    write_text(run_dir.slurm / f"job-{job}.log", "0: step 6\n" * 9)
