"""A prepared corpus of random token ids, written by the package's own shard and manifest code: no text, no tokenizer.

Lengths are log-normal, fitted to the means and 95th percentiles of a sample of English-German news and proceedings
(28.9 + 30.8 and 54 / 58 tokens); that the logarithms of both sides correlate by 0.9 is an assumption. Token ids are
drawn by Zipf's law, independently of each other.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import (
    SHARD_FOLDER,
    Manifest,
    RowGroup,
    Shard,
    Split,
    TokenizerFiles,
    content_digest,
)
from dist_transformer.data.prepare.shards import LARGEST_UINT16_VOCABULARY, count_tokens, write_shard
from dist_transformer.training.run_data import RunData

PAD_ID, BOS_ID, EOS_ID, FIRST_WORD_ID = 0, 1, 2, 4
MEAN_SOURCE_TOKENS, MEAN_TARGET_TOKENS = 29.0, 31.0
LOG_DEVIATION, LOG_CORRELATION = 0.44, 0.9
"""Parameters of the logarithms of both sides' lengths."""
LONGEST_TOKENS = 256
SHARD_ROWS = 1 << 17
SEED = 1
NO_TOKENIZER = TokenizerFiles("none", "none", "none", "none")
TRAINING = "train"


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus in a folder."""

    folder: Path
    manifest: Manifest

    @property
    def split(self) -> Split:
        return self.manifest.splits[TRAINING]

    def run_data(self, lanes: int, max_tokens: int, window_rows: int) -> RunData:
        """Returns the data of a run with these settings on the corpus."""
        data = {"lanes": lanes, "max_tokens": max_tokens, "window_rows": window_rows}
        return RunData(synthetic_config(self.folder, data, {}), self.folder, self.manifest)


def write_tokens(folder: Path, num_pairs: int, vocabulary: int, row_group_rows: int) -> Corpus:
    """Writes a prepared corpus of random ids, of two bytes each; the same arguments give the same files."""
    assert vocabulary <= LARGEST_UINT16_VOCABULARY
    random = np.random.default_rng(SEED)
    shards = []
    for first in range(0, num_pairs, SHARD_ROWS):
        row_ids = np.arange(first, min(first + SHARD_ROWS, num_pairs))
        source, target = (_ids(lengths, vocabulary, random) for lengths in pair_lengths(len(row_ids), random))
        table = pa.table({"row_id": row_ids, "source": source, "target": target})
        shards.append(
            write_shard(table, folder, f"{SHARD_FOLDER}/train-{len(shards):05d}.parquet", row_group_rows, count_tokens)
        )
    manifest = manifest_of(shards, vocabulary)
    manifest.save(folder)
    return Corpus(folder, manifest)


def synthetic_config(folder: Path, data: dict[str, object], tokenizer: dict[str, object]) -> Config:
    """Returns a configuration with these settings; its corpus is `<folder>/text.parquet`, which need not exist."""
    train = {"path": str(folder / "text.parquet"), "columns": ("en", "de")}
    filters = {"max_tokens": LONGEST_TOKENS}
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "root": str(folder / "runs"), "seed": SEED},
            "data": {"train": train, "filters": filters, **data},
            "tokenizer": tokenizer,
        }
    )


def pair_lengths(num_pairs: int, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draws the tokens of the sources and of the targets, end of sentence included."""
    covariance = LOG_DEVIATION**2 * np.array([[1.0, LOG_CORRELATION], [LOG_CORRELATION, 1.0]])
    logarithms = random.multivariate_normal([0.0, 0.0], covariance, num_pairs).T
    # The mean of a log-normal variable is exp(mean + variance / 2) of its logarithm.
    source, target = np.exp(logarithms - LOG_DEVIATION**2 / 2) * [[MEAN_SOURCE_TOKENS], [MEAN_TARGET_TOKENS]]
    sides = [np.clip(np.rint(side), 2, LONGEST_TOKENS).astype(np.int64) for side in (source, target)]
    return sides[0], sides[1]


def manifest_of(shards: list[Shard], vocabulary: int) -> Manifest:
    """Returns the manifest of a corpus of these shards."""
    groups: list[RowGroup] = [group for shard in shards for group in shard.row_groups]
    rows, source, target = (
        sum(getattr(g, count) for g in groups) for count in ("rows", "source_tokens", "target_tokens")
    )
    recipe, training = {"synthetic": True}, (TRAINING,)
    splits = {TRAINING: Split(tuple(shards), rows, source, target, LONGEST_TOKENS, LONGEST_TOKENS, rows, {})}
    return Manifest(
        digest=content_digest(recipe, NO_TOKENIZER, splits, training),
        recipe=recipe,
        tokenizer=NO_TOKENIZER,
        source_vocabulary=vocabulary,
        target_vocabulary=vocabulary,
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        source_language="en",
        target_language="de",
        splits=splits,
        training=training,
    )


def _ids(lengths: NDArray[np.int64], vocabulary: int, random: np.random.Generator) -> pa.ListArray:
    ends = np.cumsum(lengths)
    ids = FIRST_WORD_ID + zipf_ranks(vocabulary - FIRST_WORD_ID, int(ends[-1]), random)
    ids[ends - 1] = EOS_ID
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), pa.array(ids.astype(np.uint16)))


def zipf_ranks(limit: int, number: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draws log-uniform ranks from 0: the probability of rank r is about proportional to 1 / (r + 1)."""
    return (limit ** random.random(number)).astype(np.int64) - 1
