"""Files of a corpus: their names, their formats, and a cheap fingerprint of them."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.paths import is_address, is_pattern, local_files, located
from dist_transformer.data.sources.demo_corpus import DEMO_VERSION
from dist_transformer.data.sources.remote import base_name, file_fingerprint, files_of_address
from dist_transformer.errors import DataError
from dist_transformer.plugins import find

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz"}
PACKED_STARTS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\3\4", *(b"BZh%d1AY&SY" % n for n in range(1, 10)))
"""First bytes of compressed files: gzip, zstd, xz; zip and bzip2, which are not read."""
LINE_SUFFIXES = (".tsv", ".csv", ".jsonl")
ARROW_SUFFIXES = (".parquet", ".arrow")
THREADS = 16
"""Threads for requests to remote filesystems, one request for each file of a pattern."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class CorpusFiles:
    """Paths and addresses of a corpus; file i of one side is aligned with file i of the other."""

    source: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    path: tuple[str, ...] = ()

    def every(self) -> tuple[str, ...]:
        return (*self.source, *self.target, *self.path)


def find_corpus_files(corpus: CorpusConfig, data: DataConfig) -> CorpusFiles:
    """Returns the files of a corpus, its patterns resolved; none for a Hub dataset or the demonstration corpus.

    DataError if a local file is missing, no file matches a pattern, or the sides have different numbers of files. An
    address without a pattern is assumed to exist until it is opened.
    """
    files = CorpusFiles(*(_expand(getattr(corpus, key), data) for key in ("source", "target", "path")))
    if len(files.source) != len(files.target):
        raise DataError(
            f"{corpus_name(corpus, data)}: {len(files.source)} files fit the source, but {len(files.target)} the "
            f"target; file n of one side, in the order of their names, is aligned with file n of the other."
        )
    return files


def is_text_at_hand(corpus: CorpusConfig, data: DataConfig) -> bool:
    """True if all local files of a corpus exist; remote files, the Hub and the demo corpus count as existing."""
    names = (corpus.source, corpus.target, corpus.path)
    return all(is_address(located(data.root, name)) or local_files(data.root, name) for name in names if name)


def has_address(corpus: CorpusConfig, data: DataConfig) -> bool:
    """True if a file of a corpus is remote, so that even to look at it asks a server."""
    return any(is_address(located(data.root, name)) for name in (corpus.source, corpus.target, corpus.path) if name)


def corpus_name(corpus: CorpusConfig, data: DataConfig) -> str:
    """Name of a corpus in messages."""
    if corpus.hub:
        return f"{corpus.hub} ({', '.join(filter(None, (corpus.subset, corpus.split)))})"
    if corpus.demo:
        return f"the demonstration corpus ({corpus.demo})"
    if corpus.plugin:
        return corpus.plugin
    return " + ".join(located(data.root, name) for name in (corpus.source, corpus.target, corpus.path) if name)


def table_kind(file: str) -> str:
    """Returns tsv, csv, jsonl, parquet or arrow, by the file's name without .gz, .zst or .xz; else DataError."""
    name = base_name(file)
    plain = name.removesuffix(compression_suffix(file))
    kind = next((suffix for suffix in LINE_SUFFIXES + ARROW_SUFFIXES if plain.endswith(suffix)), None)
    if kind is None:
        raise DataError(
            f"{file}: cannot tell the format of {name!r}; expected a name that ends in "
            f"{', '.join(LINE_SUFFIXES)}, optionally with .gz, .zst or .xz, or in {', '.join(ARROW_SUFFIXES)}. "
            f"Two plain text files go in source and target."
        )
    if kind in ARROW_SUFFIXES and plain != name:
        raise DataError(f"{file}: files of this format are compressed inside. Unpack it, and name it *{kind}.")
    return kind[1:]


def compression_suffix(file: str) -> str:
    """Returns .gz, .zst, .xz, or ""."""
    return next((suffix for suffix in COMPRESSIONS if base_name(file).endswith(suffix)), "")


def corpus_fingerprint(corpus: CorpusConfig, data: DataConfig) -> dict[str, Any]:
    """Returns a fingerprint of a corpus, without reading all of it: part of the recipe of a prepared corpus.

    A file enters by its name, size and the SHA-256 of its first and last MiB, not by its folder or time: a corpus may
    be moved. A Hub dataset enters by its id, subset, split and revision. DataError if a file is missing.
    """
    given: dict[str, Any] = {"tags": list(corpus.tags)} if corpus.tags else {}
    if data.languages_of(corpus) != data.languages_of(CorpusConfig()):
        given["languages"] = list(data.languages_of(corpus))
    if corpus.demo:
        return {**given, "demo": corpus.demo, "version": DEMO_VERSION}
    if corpus.plugin:
        return {**given, "plugin": find("data", corpus.plugin).identity}
    given["columns"] = list(corpus.columns) if corpus.columns else None
    if corpus.hub:
        return {**given, **corpus.model_dump(include={"hub", "subset", "split", "revision"})}
    files = find_corpus_files(corpus, data).every()
    return {**given, "files": for_each_file(file_fingerprint, files)}


def for_each_file(ask: Callable[[Item], Result], files: Iterable[Item]) -> list[Result]:
    """Calls `ask` for each file, many at a time: remote filesystems answer slowly."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(ask, files))


def _expand(name: str | None, data: DataConfig) -> tuple[str, ...]:
    if name is None:
        return ()
    location = located(data.root, name)
    if is_address(location):
        return tuple(files_of_address(location))
    files = local_files(data.root, name)
    if not files:
        problem = "no file fits this pattern" if is_pattern(name) else "no such file"
        if os.path.exists(location):
            problem = "is a pipe or a folder, expected a file: write it into one first"
        root = "" if os.path.isabs(name) else f" Relative corpus paths start from data.root, which is {data.root!r}."
        raise DataError(f"{os.path.abspath(location)}: {problem}.{root}")
    if unnamed := [file for file in files if file != file.encode("utf-8", "ignore").decode()]:
        raise DataError(
            f"{unnamed[0]!r}: expected a name in UTF-8, got other bytes in it: rename it, or set LC_ALL=C.UTF-8."
        )
    return tuple(files)
