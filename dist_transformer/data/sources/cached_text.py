"""Cache of the text of validation corpora from the Hub or an address, in the prepared folder.

Training reads that text at each start; with a copy, it can do so on a node without a network. Files on local disks are
read in place.
"""

from contextlib import suppress
from pathlib import Path

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import json_digest
from dist_transformer.data.sources.corpus import read_pairs
from dist_transformer.data.sources.files import has_address
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
    """Reads pairs as `read_pairs`. A corpus that is not local is read once, then from its copy in `folder`."""
    if not corpus.hub and not has_address(corpus, data):
        return read_pairs(corpus, data, most)
    settings = data.model_dump(mode="json", include={"root", "source_language", "target_language", "normalization"})
    settings |= {"most": most, "corpus": corpus.model_dump(mode="json")}
    copy = folder / FOLDER / f"{json_digest(settings)[:16]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = read_json(copy)
        return kept["source"], kept["target"]
    source, target = read_pairs(corpus, data, most)
    with suppress(OSError):  # the prepared folder may be closed to this user
        write_json(copy, {"source": source, "target": target})
    return source, target
