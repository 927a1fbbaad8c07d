"""Results of nodes, for the table of `pipeline status` and the page of `pipeline report`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_transformer.config.data_schema import MODIFIERS
from dist_transformer.config.metrics import MEASURES
from dist_transformer.files import modified
from dist_transformer.format import duration, table
from dist_transformer.pipeline.schema import KINDS, Pipeline
from dist_transformer.pipeline.state import State, made_at, made_files
from dist_transformer.run.attempts import attempts
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record
from dist_transformer.run.status import SILENT_SECONDS, look_at

COLUMNS = ("node", "kind", "state", "since", "took", "result")
SHOWN = {
    **{key: MEASURES[key][:2] for key in ("bleu", "chrf")},
    **{f"bleu.{name}": (f"BLEU {name}", ".2f") for name in MODIFIERS},
    "beam_size": ("beam", "d"), "sentences_per_second": ("sentences/s", ",.1f"),
    "step": ("step", ",d"), "loss": MEASURES["loss"][:2], "tokens_per_second": ("tokens/s", ",.0f"),
    "pairs": ("pairs", ",d"), "kept_lines": ("kept", ",d"), "lines": ("lines", ",d"), "megabytes": ("MB", ",.2f"),
}  # fmt: skip
"""Numbers of nodes: their names and formats."""


def results_of(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """The numbers of a node, as far as there are any; the size is that of its model, or of what it has made."""
    node, folder = pipeline.nodes[name], pipeline.folder(name)
    place = folder / KINDS[node.kind].made[0]
    if node.kind == "train":
        view = look_at(RunDir(folder))
        found: dict[str, Any] = {**view.newest, "step": view.step}
    elif node.kind == "evaluate":
        found, place = read_record(place), pipeline.located(node.values["model"])
    elif node.kind == "prepare":
        manifest, place = read_record(place), folder / "corpus" / "shards"
        found = {"pairs": sum(manifest["splits"][corpus]["rows"] for corpus in manifest.get("training", ()))}
    else:
        found = read_record(folder / "counts.json") or read_record(folder / "text.plan.json")
    place = place / "model" if (place / "model").is_dir() else place
    sizes = [path.stat().st_size for path in (place.iterdir() if place.is_dir() else [place]) if path.is_file()]
    found["megabytes"] = sum(sizes) / 1e6 if sizes else None
    return {key: found[key] for key in SHOWN if isinstance(found.get(key), int | float)}


def status_rows(pipeline: Pipeline, states: Mapping[str, State], jobs: Mapping[str, str]) -> list[list[str]]:
    """The rows of the table. `jobs`: what Slurm says of the jobs of nodes."""
    rows = []
    for name in pipeline.marked.values["nodes"]:
        state = states[name]
        begun, done = _begun(pipeline.folder(name), state.record), state.record.get("done")
        done = done or (made_at(made_files(pipeline, name)) if state.state == "done" else None)
        last = done or begun or state.record.get("submitted")
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(last)) if last else "-"
        results = results_of(pipeline, name) if last else {}
        text = ", ".join(f"{SHOWN[key][0]} {_shown(results, key)}" for key in results)
        words = jobs.get(name) or _state_text(pipeline.folder(name), state)
        took = duration(done - begun if done and begun else None)
        rows.append([name, pipeline.nodes[name].kind, words, since, took, text or "-"])
    return rows


def _begun(folder: Path, record: Mapping[str, Any]) -> float | None:
    """When a node began; on Slurm a training job notes it, and `prepare` and `translate` do not."""
    noted = (attempt["time"] for attempt in attempts(RunDir(folder)) if attempt["event"] == "began")
    return record["begun"] if "begun" in record else next(noted, None)


def report(pipeline: Pipeline, states: Mapping[str, State]) -> Iterator[str]:
    """Yields the lines of a page in Markdown: scores and speeds, sizes of models, then every node."""
    yield f"# {pipeline.path.stem}\n\n`{pipeline.path}`, results in `{pipeline.root}`."
    for title, kinds in (("Scores", ("evaluate",)), ("Models", ("train", "average", "export"))):
        done = (name for name in pipeline.marked.values["nodes"] if not states[name].is_due)
        found = {name: results_of(pipeline, name) for name in done if pipeline.nodes[name].kind in kinds}
        keys = [key for key in SHOWN if any(key in each for each in found.values())]
        rows = [[name, *(_shown(each, key) for key in keys)] for name, each in found.items()]
        if rows:
            yield from (f"\n## {title}\n", *table(["node", *(SHOWN[key][0] for key in keys)], rows, is_markdown=True))
    yield from ("\n## Nodes\n", *table(COLUMNS, status_rows(pipeline, states, {}), is_markdown=True))


def _shown(results: Mapping[str, Any], key: str) -> str:
    return format(results[key], SHOWN[key][1]) if key in results else "-"


def _state_text(folder: Path, state: State) -> str:
    """The state in words; of a node that has begun, whether a process works on it."""
    if state.restarts:
        return f"to do ({state.why})" if state.why else "to do"
    with suppress(OSError):
        if state.state == "begun" and abs(time.time() - modified(RunDir(folder).owner)) < SILENT_SECONDS:
            return "running"
    code = state.record.get("ended")
    return (f"failed (exit code {code})" if code else "stopped") if state.state == "begun" else state.state
