"""What an unfinished preparation has already done: `prepare_state.json`, replaced after every finished piece."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dist_transformer.data.manifest import Shard, Split, TokenizerFiles, shard_from_json, shard_to_json
from dist_transformer.errors import DataError
from dist_transformer.run_dir import read_json, write_json

STATE_NAME = "prepare_state.json"


@dataclass(frozen=True)
class Chunk:
    """The outcome of one run of read rows: how many were kept, and why the others were not."""

    read_rows: int
    rows: int
    source_tokens: int
    target_tokens: int
    max_source_tokens: int
    max_target_tokens: int
    dropped: dict[str, int]


@dataclass
class SplitState:
    """Chunks that are read and tokenized, and shards that are written."""

    chunks: list[Chunk] = field(default_factory=list)
    all_read: bool = False
    shards: list[Shard] = field(default_factory=list)
    ranges_done: int = 0

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def read_rows(self) -> int:
        return sum(chunk.read_rows for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """Source and target tokens together."""
        return sum(chunk.source_tokens + chunk.target_tokens for chunk in self.chunks)

    @property
    def dropped(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for chunk in self.chunks:
            total.update(chunk.dropped)
        return dict(sorted(total.items()))

    def finished(self) -> Split:
        return Split(
            shards=tuple(self.shards),
            rows=self.rows,
            source_tokens=sum(chunk.source_tokens for chunk in self.chunks),
            target_tokens=sum(chunk.target_tokens for chunk in self.chunks),
            max_source_tokens=max(chunk.max_source_tokens for chunk in self.chunks),
            max_target_tokens=max(chunk.max_target_tokens for chunk in self.chunks),
            read_rows=self.read_rows,
            dropped=self.dropped,
        )


@dataclass
class PrepareState:
    """All of `prepare_state.json`. `rows_total` is what the first scan of the text counted, where it could."""

    recipe: dict[str, Any]
    scanned: bool = False
    rows_total: dict[str, int | None] = field(default_factory=dict)
    tokenizer: TokenizerFiles | None = None
    splits: dict[str, SplitState] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path) -> "PrepareState | None":
        """None where nothing was begun; DataError when the file cannot be understood."""
        path = folder / STATE_NAME
        if not path.exists():
            return None
        try:
            value = read_json(path)
            return PrepareState(
                recipe=value["recipe"],
                scanned=value["scanned"],
                rows_total=value["rows_total"],
                tokenizer=TokenizerFiles(**value["tokenizer"]) if value["tokenizer"] else None,
                splits={name: _split_from_json(split) for name, split in value["splits"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: cannot be read ({error!r}). Delete {folder} and prepare again.") from error

    def save(self, folder: Path) -> None:
        write_json(
            folder / STATE_NAME,
            {
                "recipe": self.recipe,
                "scanned": self.scanned,
                "rows_total": self.rows_total,
                "tokenizer": asdict(self.tokenizer) if self.tokenizer else None,
                "splits": {name: _split_to_json(split) for name, split in self.splits.items()},
            },
        )


def _split_to_json(split: SplitState) -> dict[str, Any]:
    return {
        "chunks": [asdict(chunk) for chunk in split.chunks],
        "all_read": split.all_read,
        "shards": [shard_to_json(shard) for shard in split.shards],
        "ranges_done": split.ranges_done,
    }


def _split_from_json(value: dict[str, Any]) -> SplitState:
    return SplitState(
        chunks=[Chunk(**chunk) for chunk in value["chunks"]],
        all_read=value["all_read"],
        shards=[shard_from_json(shard) for shard in value["shards"]],
        ranges_done=value["ranges_done"],
    )
