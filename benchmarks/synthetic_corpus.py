"""A prepared corpus of random token ids, written by the package's own shard and manifest code: no text, no tokenizer.

Lengths are log-normal, fitted to the means and 95th percentiles of a sample of English-German news and proceedings
(28.9 + 30.8 and 54 / 58 tokens); that the logarithms of both sides correlate by 0.9 is an assumption. Token ids are drawn
by Zipf's law, independently of each other.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_transformer.data.manifest import (
    SHARD_FOLDER,
    Manifest,
    RowGroup,
    Shard,
    Split,
    TokenizerFiles,
    content_digest,
)
from dist_transformer.data.shards import token_table, write_shard

PAD_ID, BOS_ID, EOS_ID, FIRST_WORD_ID = 0, 1, 2, 4
MEAN_SOURCE_TOKENS, MEAN_TARGET_TOKENS = 29.0, 31.0
LOG_DEVIATION, LOG_CORRELATION = 0.44, 0.9
"""Of the logarithms of both sides' lengths."""
LONGEST_TOKENS = 256
SHARD_ROWS = 1 << 17
NO_TOKENIZER = TokenizerFiles("none", "none", "none", "none")


def write_corpus(folder: Path, num_pairs: int, vocabulary: int, row_group_rows: int, seed: int) -> Manifest:
    """`num_pairs` pairs as the split `train` of a prepared folder; the same arguments give the same files."""
    random = np.random.default_rng(seed)
    shards = []
    for first in range(0, num_pairs, SHARD_ROWS):
        row_ids = np.arange(first, min(first + SHARD_ROWS, num_pairs))
        lengths = pair_lengths(len(row_ids), random)
        sides = [_sentences(side, vocabulary, random) for side in lengths]
        file = f"{SHARD_FOLDER}/train-{len(shards):05d}.parquet"
        shards.append(write_shard(token_table(row_ids, *sides, (vocabulary,) * 2), folder, file, row_group_rows))
    manifest = _manifest(_split(shards, num_pairs), vocabulary)
    manifest.save(folder)
    return manifest


def pair_lengths(num_pairs: int, random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of the sources and of the targets, end of sentence included."""
    covariance = LOG_DEVIATION**2 * np.array([[1.0, LOG_CORRELATION], [LOG_CORRELATION, 1.0]])
    logarithms = random.multivariate_normal([0.0, 0.0], covariance, num_pairs).T
    # The mean of a log-normal variable is exp(mean + variance / 2) of its logarithm.
    source, target = np.exp(logarithms - LOG_DEVIATION**2 / 2) * [[MEAN_SOURCE_TOKENS], [MEAN_TARGET_TOKENS]]
    sides = [np.clip(np.rint(side), 2, LONGEST_TOKENS).astype(np.int64) for side in (source, target)]
    return sides[0], sides[1]


def _sentences(lengths: NDArray[np.int64], vocabulary: int, random: np.random.Generator) -> list[list[int]]:
    ends = np.cumsum(lengths)
    # Log-uniform ranks: the chance of rank r is about proportional to 1 / r.
    ranks = (vocabulary - FIRST_WORD_ID) ** random.random(int(ends[-1]))
    ids = FIRST_WORD_ID + ranks.astype(np.int64) - 1
    ids[ends - 1] = EOS_ID
    flat = ids.tolist()
    return [flat[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _split(shards: list[Shard], num_pairs: int) -> Split:
    groups: list[RowGroup] = [group for shard in shards for group in shard.row_groups]
    source, target = sum(g.source_tokens for g in groups), sum(g.target_tokens for g in groups)
    return Split(tuple(shards), num_pairs, source, target, LONGEST_TOKENS, LONGEST_TOKENS, num_pairs, {})


def _manifest(split: Split, vocabulary: int) -> Manifest:
    recipe, splits = {"synthetic": True}, {"train": split}
    return Manifest(
        digest=content_digest(recipe, NO_TOKENIZER, splits),
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
    )
