"""The scores that `evaluate` keeps in a run folder."""

from contextlib import suppress
from pathlib import Path

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.files import file_sha256
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import Record, read_record

OF_MODEL, OF_FILE, OF_TEXTS = "model_sha256", "model_file", "texts_sha256"
"""Entries of a file in evaluation/ that identify the weights file of the model that was scored: its SHA-256; its size and
modification time, which spare the reading of a file that is still the same; SHA-256 of translations and references."""

SEARCH = DecodingConfig().model_dump(exclude={"max_tokens", "n_best"})
"""Settings of a search on which the translations depend, with the defaults, which hold for a version without them."""


def search_of(scores: Record) -> Record:
    """Returns the settings that decided the search of kept scores."""
    unused = ("beam_size", "length_penalty") if scores.get("sampling") else ("temperature", "top_k", "top_p", "seed")
    return {key: scores.get(key, default) for key, default in SEARCH.items() if key not in unused}


def search_text(scores: Record) -> str:
    """Returns text like "greedy search", "beam 4" or "sampled (seed 5)", with what is not the default; empty without a beam."""
    found, beam = search_of(scores), scores.get("beam_size")
    said = f"sampled (seed {found['seed']})" if found["sampling"] else "greedy search" if beam == 1 else f"beam {beam}"
    others = (key for key in found if key not in ("beam_size", "sampling", "seed") and found[key] != SEARCH[key])
    return ", ".join([said, *(f"{key} {found[key]}" for key in others)]) if isinstance(beam, int) else ""


def entries_of(weights: Path) -> dict[str, str]:
    """Returns the entries for this weights file."""
    return {OF_FILE: _stamp(weights), OF_MODEL: file_sha256(weights)}


def _stamp(weights: Path) -> str:
    found = weights.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def evaluations_of(run_dir: RunDir) -> tuple[dict[str, Record], list[str]]:
    """Returns the scores of model/ by the name of their corpus, and the names of the corpora whose scores are of another model.

    Scores of a version that did not record their model are returned as they are, and so are all where model/ is gone.
    """
    found = {path.stem: read_record(path) for path in sorted(run_dir.evaluation.glob("*.json"))}
    weights, others = run_dir.model / "model.safetensors", list[str]()
    with suppress(OSError):
        now = _stamp(weights)
        unsure = [name for name, scores in found.items() if OF_MODEL in scores and scores.get(OF_FILE) != now]
        digest = file_sha256(weights) if unsure else ""
        others = [name for name in unsure if found[name][OF_MODEL] != digest]
    return {name: scores for name, scores in found.items() if name not in others}, others
