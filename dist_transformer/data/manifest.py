"""What a prepared corpus holds: its shards, row groups, tokenizer and the recipe that made it.

    <folder>/manifest.json            written last: a folder with one is complete
    <folder>/tokenizer/source.model   (and target.model where the vocabularies are not shared)
    <folder>/shards/train-00000.parquet ...  validation-00000.parquet ...

Columns of a shard: `row_id` int64 (row number in the corpus as it was read), `source` and `target` lists of token ids,
both ending with the end-of-sentence id and without a begin-of-sentence id.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dist_transformer.errors import DataError
from dist_transformer.run_dir import write_text

MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"
SHARD_FOLDER = "shards"
TOKENIZER_FOLDER = "tokenizer"
HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class RowGroup:
    """Rows that are read together; tokens count the end of sentence."""

    rows: int
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True)
class Shard:
    """One parquet file; `file` is relative to the prepared folder."""

    file: str
    bytes: int
    sha256: str
    row_groups: tuple[RowGroup, ...]


@dataclass(frozen=True)
class Split:
    """The kept rows of one corpus, and what became of the others: `dropped` counts rows by rule."""

    shards: tuple[Shard, ...]
    rows: int
    source_tokens: int
    target_tokens: int
    max_source_tokens: int
    max_target_tokens: int
    read_rows: int
    dropped: dict[str, int]

    @cached_property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """All row groups in order, those of the first shard first."""
        return tuple(group for shard in self.shards for group in shard.row_groups)


@dataclass(frozen=True)
class TokenizerFiles:
    """The sentencepiece models, relative to the prepared folder; one file twice where the vocabulary is shared."""

    source: str
    target: str
    source_sha256: str
    target_sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete prepared corpus. `digest` stands for its content: two of the same digest hold the same rows."""

    digest: str
    recipe: dict[str, Any]
    tokenizer: TokenizerFiles
    source_vocabulary: int
    target_vocabulary: int
    pad_id: int
    bos_id: int
    eos_id: int
    source_language: str
    target_language: str
    splits: dict[str, Split]
    version: int = MANIFEST_VERSION

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Reads `<folder>/manifest.json`; DataError when it is missing, damaged or of another version."""
        path = folder / MANIFEST_NAME
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{folder}: no complete prepared corpus here ({MANIFEST_NAME} is missing). Run `prepare` first."
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be read as a manifest ({error}). Delete {folder} and prepare again."
            ) from error
        return _manifest_from_json(value, path)

    def save(self, folder: Path) -> None:
        """Writes `<folder>/manifest.json` in one rename: from then on the folder is complete."""
        write_text(folder / MANIFEST_NAME, json.dumps(_manifest_to_json(self), ensure_ascii=False) + "\n")


def content_digest(recipe: dict[str, Any], tokenizer: TokenizerFiles, splits: dict[str, Split]) -> str:
    """SHA-256 over the recipe and the checksums of every shard and of the tokenizer."""
    shards = {name: [[shard.file, shard.sha256] for shard in split.shards] for name, split in splits.items()}
    return json_digest([recipe, tokenizer.source_sha256, tokenizer.target_sha256, shards])


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def verify_shards(folder: Path, manifest: Manifest, deep: bool = False) -> None:
    """Checks that every shard exists with its size, and its SHA-256 when `deep`; DataError names the first bad one."""
    for split in manifest.splits.values():
        for shard in split.shards:
            verify_shard(folder, shard, deep)


def verify_shard(folder: Path, shard: Shard, deep: bool = False) -> None:
    """`verify_shards` of one."""
    path = folder / shard.file
    if not path.is_file():
        raise DataError(f"{path}: a shard of the prepared corpus is missing. Delete {folder} and prepare again.")
    if (size := path.stat().st_size) != shard.bytes:
        raise DataError(
            f"{path}: the shard has {size} bytes, the manifest says {shard.bytes}. Delete {folder} and prepare again."
        )
    if deep and (found := file_sha256(path)) != shard.sha256:
        raise DataError(
            f"{path}: the shard is damaged: its SHA-256 is {found}, the manifest says {shard.sha256}. "
            f"Delete {folder} and prepare again."
        )


def shard_to_json(shard: Shard) -> dict[str, Any]:
    """Row groups as lists of three numbers: a corpus of 10^9 rows has 250,000 of them."""
    groups = [[group.rows, group.source_tokens, group.target_tokens] for group in shard.row_groups]
    return {"file": shard.file, "bytes": shard.bytes, "sha256": shard.sha256, "row_groups": groups}


def shard_from_json(value: dict[str, Any]) -> Shard:
    groups = tuple(RowGroup(*group) for group in value["row_groups"])
    return Shard(value["file"], value["bytes"], value["sha256"], groups)


def split_to_json(split: Split) -> dict[str, Any]:
    return {**_plain_fields(split), "shards": [shard_to_json(shard) for shard in split.shards]}


def split_from_json(value: dict[str, Any]) -> Split:
    return Split(**{**value, "shards": tuple(shard_from_json(shard) for shard in value["shards"])})


def _manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    splits = {name: split_to_json(split) for name, split in manifest.splits.items()}
    return {**_plain_fields(manifest), "tokenizer": _plain_fields(manifest.tokenizer), "splits": splits}


def _manifest_from_json(value: Any, path: Path) -> Manifest:
    if isinstance(value, dict) and value.get("version") != MANIFEST_VERSION:
        raise DataError(
            f"{path}: manifest version {value.get('version')}, this program reads version {MANIFEST_VERSION}. "
            f"Prepare the corpus again with this version."
        )
    try:
        tokenizer = TokenizerFiles(**value["tokenizer"])
        splits = {name: split_from_json(split) for name, split in value["splits"].items()}
        manifest = Manifest(**{**value, "tokenizer": tokenizer, "splits": splits})
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a manifest ({error!r}). Delete {path.parent} and prepare again.") from error
    if manifest.digest != content_digest(manifest.recipe, tokenizer, splits):
        raise DataError(f"{path}: its digest does not fit its content. Delete {path.parent} and prepare again.")
    return manifest


def _plain_fields(record: Any) -> dict[str, Any]:
    """The dataclass's own fields, without cached properties and without copying deeply."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
