"""The scores that `evaluate` keeps in a run folder."""

from contextlib import suppress

from dist_transformer.files import file_sha256
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import Record, read_record

OF_MODEL = "model_sha256"
"""The entry of a file in evaluation/ that identifies the weights file of the model that was scored."""


def evaluations_of(run_dir: RunDir) -> tuple[dict[str, Record], list[str]]:
    """Returns the scores of model/ by the name of their corpus, and the names of the corpora whose scores are of another model.

    Scores of a version that did not record their model are returned as they are, and so are all where model/ is gone.
    """
    found, now = {path.stem: read_record(path) for path in sorted(run_dir.evaluation.glob("*.json"))}, None
    if any(OF_MODEL in scores for scores in found.values()):
        with suppress(OSError):
            now = file_sha256(run_dir.model / "model.safetensors")
    others = [name for name, scores in found.items() if now is not None and scores.get(OF_MODEL, now) != now]
    return {name: scores for name, scores in found.items() if name not in others}, others
