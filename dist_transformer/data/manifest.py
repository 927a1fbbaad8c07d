"""Content of a prepared corpus: its shards, row groups, tokenizer and the recipe that made it.

    <folder>/manifest.json            written last: a folder with one is complete
    <folder>/tokenizer/source.model   (and target.model where the vocabularies are not shared)
    <folder>/shards/train-00000.parquet ...  validation-00000.parquet ...

    <folder>/report.json, report.md, lengths.png   statistics: rows read, dropped and repeated, lengths of the rest

Columns of a shard: `row_id` int64 (row number in the corpus as it was read), `source` and `target` lists of token ids,
both ending with the end-of-sentence id and without a begin-of-sentence id. Where text is tokenized on the fly
(`Split.text`) a shard holds text instead, or is the user's own parquet file, read in place.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from dist_transformer.config.paths import is_address
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.errors import DataError
from dist_transformer.files import read_json_patiently, write_text

MANIFEST_VERSION = 2
MANIFEST_NAME = "manifest.json"
SHARD_FOLDER = "shards"
TOKENIZER_FOLDER = "tokenizer"

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Counts = dict[str, Count]


class RowGroup(NamedTuple):
    """Rows that are read together; tokens count the end of sentence."""

    rows: Count
    source_tokens: Count
    target_tokens: Count


@dataclass(frozen=True)
class Shard:
    """One parquet file.

    Attributes:
        file: relative to the prepared folder; an absolute path or an address ("://") is the user's own file, in place.
        sha256: digest of its bytes; for a file in place, its fingerprint.
    """

    file: str
    bytes: Count
    sha256: str
    row_groups: tuple[RowGroup, ...]

    @property
    def is_in_place(self) -> bool:
        """True if this is the user's own file and not one that `prepare` wrote."""
        return is_address(self.file) or Path(self.file).is_absolute()


@dataclass(frozen=True)
class TextColumns:
    """Columns of shards that hold text, which is tokenized when it is read.

    Attributes:
        source: name of the column, dots reach into nested ones; `target` likewise.
        prefix: the tags, each with a space after it, which the reader prepends to each source sentence.
    """

    source: str
    target: str
    prefix: str


@dataclass(frozen=True)
class Split:
    """The kept rows of one corpus, and the counts of the others.

    Attributes:
        source_tokens: end of sentence included; estimated where `text` is set, as in the row groups.
        dropped: number of dropped rows by rule.
        text: columns of shards with text; None: the shards hold token ids.
    """

    shards: tuple[Shard, ...]
    rows: Count
    source_tokens: Count
    target_tokens: Count
    max_source_tokens: Count
    max_target_tokens: Count
    read_rows: Count
    dropped: Counts
    text: TextColumns | None = None

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
    """A complete prepared corpus. `digest` identifies its content: two with the same digest hold the same rows.

    Attributes:
        splits: the training corpora by name, and `validation` where there is one.
        training: names of the training corpora; the index of a name is the corpus number in a row id.
        commits: the commits of Hub datasets that were read, by id@revision; no part of the digest.
    """

    digest: str
    recipe: dict[str, Any]
    tokenizer: TokenizerFiles
    source_vocabulary: Count
    target_vocabulary: Count
    pad_id: Count
    bos_id: Count
    eos_id: Count
    source_language: str
    target_language: str
    splits: dict[str, Split]
    training: tuple[str, ...]
    version: int = MANIFEST_VERSION
    commits: dict[str, str] = field(default_factory=dict)

    @property
    def special(self) -> SpecialTokens:
        return SpecialTokens(self.bos_id, self.eos_id, self.pad_id)

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Reads `<folder>/manifest.json`; DataError if it is missing, damaged or of another version.

        MachineError if its disk does not answer, in which case the corpus need not be prepared again.
        """
        path = folder / MANIFEST_NAME
        try:
            value = read_json_patiently(path)
        except FileNotFoundError:
            raise DataError(
                f"{folder}: no complete prepared corpus here ({MANIFEST_NAME} is missing). Run `prepare` first."
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be read as a manifest ({error}). Delete {folder} and prepare again."
            ) from error
        if isinstance(value, dict) and value.get("version") != MANIFEST_VERSION:
            raise DataError(
                f"{path}: manifest version {value.get('version')}, this program reads version {MANIFEST_VERSION}. "
                f"Prepare the corpus again with this version."
            )
        try:
            manifest = MANIFEST.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise DataError(f"{path}: not a manifest ({what}). Delete {folder} and prepare again.") from error
        if (problem := _contradiction(manifest)) is not None:
            raise DataError(f"{path}: {problem}. Delete {folder} and prepare again.")
        return manifest

    def save(self, folder: Path) -> None:
        """Writes `<folder>/manifest.json` in one rename: from then on the folder is complete."""
        write_text(folder / MANIFEST_NAME, json.dumps(MANIFEST.dump_python(self), ensure_ascii=False) + "\n")


def content_digest(
    recipe: dict[str, Any], tokenizer: TokenizerFiles, splits: dict[str, Split], training: tuple[str, ...]
) -> str:
    """SHA-256 over all that determines the rows and their order: recipe, order of the corpora, checksums of all files.

    A file in place enters by name, fingerprint and rows, without its folder: it may be moved.
    """
    contents = {
        name: [split.text and asdict(split.text), *map(_shard_content, split.shards)] for name, split in splits.items()
    }
    return json_digest([recipe, tokenizer.source_sha256, tokenizer.target_sha256, list(training), contents])


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def verify_shards(folder: Path, manifest: Manifest) -> None:
    """Checks that every shard exists with its size; DataError names the first bad one. Of the user's files read in place
    only local ones are checked.
    """
    shards = (shard for split in manifest.splits.values() for shard in split.shards)
    for shard in (shard for shard in shards if not is_address(shard.file)):
        path = folder / shard.file  # or that of a file in place, which is absolute
        size = path.stat().st_size if path.is_file() else None
        if shard.is_in_place and size is None:
            raise DataError(f"{path}: a file of the training corpus is gone. Put it back, or prepare again without it.")
        if shard.is_in_place and size != shard.bytes:
            raise DataError(
                f"{path} has {size} bytes, but had {shard.bytes} when `prepare` looked at it: it is read in place, and must "
                f"not change. Put the old one back, or prepare again in another folder."
            )
        if size != shard.bytes:
            missing = "a shard of the prepared corpus is missing"
            what = missing if size is None else f"the shard has {size} bytes, the manifest says {shard.bytes}"
            raise DataError(f"{path}: {what}. Delete {folder} and prepare again.")


def _shard_content(shard: Shard) -> list[Any]:
    if shard.is_in_place:
        return [PurePosixPath(shard.file).name, shard.sha256, [group.rows for group in shard.row_groups]]
    return [shard.file, shard.sha256]


def _contradiction(manifest: Manifest) -> str | None:
    """Finds files outside the folder, counts that differ from their sums, and a digest of other content."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards if not shard.is_in_place]
    for file in [manifest.tokenizer.source, manifest.tokenizer.target, *(shard.file for shard in shards)]:
        if not file or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\0" in file:
            return f"names {file!r}, which is no file of the prepared folder"
    for name, split in manifest.splits.items():
        if split.rows != (found := sum(group.rows for group in split.row_groups)):
            return f"{name} has {split.rows} rows, its row groups {found}"
    if missing := [name for name in manifest.training if name not in manifest.splits]:
        return f"has no corpus {missing[0]!r}"
    content = content_digest(manifest.recipe, manifest.tokenizer, manifest.splits, manifest.training)
    return None if manifest.digest == content else "its digest does not fit its content"


SHARD, MANIFEST = TypeAdapter(Shard), TypeAdapter(Manifest)
"""Both as JSON, a row group as a list of three numbers: a corpus of 10^9 rows has 250,000 of them."""
