"""Which local files a corpus names, and a cheap fingerprint of them; light enough for the checks of a configuration."""

import hashlib
from pathlib import Path
from typing import Any

from dist_transformer.config.data_models import CorpusConfig, DataConfig
from dist_transformer.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
FINGERPRINT_BLOCK_BYTES = 1 << 20


def corpus_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """The local files of a corpus, source before target; none for a Hub dataset or the demonstration corpus."""
    return [Path(data.root) / Path(name).expanduser() for name in _file_names(corpus)]


def existing_corpus_files(corpus: CorpusConfig, data: DataConfig) -> list[Path]:
    """`corpus_files`; DataError with the full path when one is missing."""
    for name in _file_names(corpus):
        if "://" in name:
            raise DataError(f"{name}: a remote address; expected text in local files or by `hub`. Download it first.")
    files = corpus_files(corpus, data)
    for path in files:
        if not path.is_file():
            raise DataError(
                f"{path.absolute()}: no such file. Relative corpus paths start from data.root, which is {data.root!r}."
            )
    return files


def corpus_name(corpus: CorpusConfig, data: DataConfig) -> str:
    """How messages name a corpus."""
    if corpus.hub:
        return f"{corpus.hub} ({', '.join(filter(None, (corpus.subset, corpus.split)))})"
    if corpus.demo:
        return f"the demonstration corpus ({corpus.demo})"
    return " + ".join(str(path) for path in corpus_files(corpus, data))


def table_kind(path: Path) -> str:
    """tsv, csv, jsonl or parquet, by the file's name without .gz or .zst; DataError for another."""
    name = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    if name.suffix not in TABLE_SUFFIXES:
        raise DataError(
            f"{path}: cannot tell the format of {path.name!r}; expected a name that ends in "
            f"{', '.join(TABLE_SUFFIXES)}, optionally with .gz or .zst. Two plain text files go in source and target."
        )
    return name.suffix[1:]


def corpus_fingerprint(corpus: CorpusConfig, data: DataConfig) -> dict[str, Any]:
    """What tells this corpus from another, without reading it all: part of the recipe of a prepared corpus.

    A file counts by its name, size and the SHA-256 of its first and last MiB, not by its folder or time: a corpus may
    be moved. A Hub dataset counts by its id, subset, split and revision. DataError when a file is missing.
    """
    given: dict[str, Any] = {"columns": list(corpus.columns) if corpus.columns else None}
    if corpus.demo:
        from dist_transformer.data.demo_corpus import DEMO_VERSION

        return {"demo": corpus.demo, "version": DEMO_VERSION}
    if corpus.hub:
        names = ("hub", "subset", "split", "revision")
        return {**given, **{name: getattr(corpus, name) for name in names}}
    return {**given, "files": [_file_fingerprint(path) for path in existing_corpus_files(corpus, data)]}


def _file_names(corpus: CorpusConfig) -> list[str]:
    return [name for name in (corpus.source, corpus.target, corpus.path) if name is not None]


def _file_fingerprint(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BLOCK_BYTES))
        file.seek(max(0, size - FINGERPRINT_BLOCK_BYTES))
        digest.update(file.read(FINGERPRINT_BLOCK_BYTES))
    return {"name": path.name, "bytes": size, "ends_sha256": digest.hexdigest()}
