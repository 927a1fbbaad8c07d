"""Cache of the text of validation corpora from the Hub or an address, in the prepared folder.

Training reads that text at each start; with a copy, it can do so on a node without a network. A dataset of the Hub is
known by its name and revision alone. Files on local disks are read in place.
"""

from contextlib import suppress
from pathlib import Path

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.paths import is_address, located
from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import json_digest
from dist_transformer.data.sources.corpus import read_pairs
from dist_transformer.data.sources.files import corpus_fingerprint
from dist_transformer.errors import UserError
from dist_transformer.files import read_json, write_json

Pairs = tuple[list[str], list[str]]
"""Source sentences and references, line by line."""
FOLDER = "validation_text"


def texts_to_keep(config: Config) -> dict[str, tuple[CorpusConfig, int | None]]:
    """Returns the corpora that training reads as text, by their keys in `data`, with their most pairs (None: all)."""
    data, settings = config.data, config.validation
    texts: dict[str, tuple[CorpusConfig, int | None]] = {}
    if data.validation is not None and settings.translate:
        texts["validation"] = data.validation, settings.max_sentences
    return texts | {f"more_validation.{name}": (corpus, None) for name, corpus in data.more_validation.items()}


def kept_pairs(corpus: CorpusConfig, data: DataConfig, most: int | None, folder: Path) -> Pairs:
    """Reads pairs as `read_pairs`. A corpus that is not local is read from its copy in `folder`, if it is the same there or
    cannot be asked for; a copy of a version before this check counts only then."""
    names = (corpus.source, corpus.target, corpus.path)
    if not corpus.hub and not any(is_address(located(data.root, name)) for name in names if name):
        return read_pairs(corpus, data, most)
    settings = data.model_dump(mode="json", include={"root", "source_language", "target_language", "normalization"})
    digest = json_digest({**settings, "most": most, "corpus": corpus.model_dump(mode="json")})
    copy = folder / FOLDER / f"{digest[:16]}.json"
    now = None
    with suppress(UserError):
        now = corpus_fingerprint(corpus, data)
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = read_json(copy)
        if now is None or kept["fingerprint"] == now:
            return kept["source"], kept["target"]
    source, target = read_pairs(corpus, data, most)
    with suppress(OSError):  # the prepared folder may be closed to this user
        write_json(copy, {"fingerprint": now, "source": source, "target": target})
    return source, target
