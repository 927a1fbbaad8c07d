"""Micro-batches of text that is not prepared: tokenized in memory, every pair kept, chunk by chunk in its order."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from dist_transformer.data.loader.loader import MicroBatch, micro_batches
from dist_transformer.data.loader.text_rows import token_column
from dist_transformer.data.loader.token_rows import TokenRows
from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import DataError

CHUNK_PAIRS = 4096
"""Number of pairs sorted by length and cut into micro-batches together, like a row group of a prepared corpus."""


def text_batches(
    builder: WindowBuilder,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    max_positions: int | None,
    name: str,
) -> Iterator[MicroBatch]:
    """Yields every pair once, in micro-batches of similar lengths; a pair above the budget has its own. Raises
    DataError: a side is longer than `max_positions`; the message names the line of the corpus `name`."""
    for first in range(0, len(sources), CHUNK_PAIRS):
        chunk = slice(first, first + CHUNK_PAIRS)
        encoded = tokenizer.encode_source(sources[chunk]), tokenizer.encode_target(targets[chunk])
        for side in encoded:
            refuse_longer([len(ids) for ids in side], max_positions, name, first)
        source, target = map(token_column, encoded)
        rows = TokenRows(np.arange(first, first + len(source.lengths)), source, target, Counter())
        yield from micro_batches(builder.build_rows(rows), 0, tokenizer.bos_id)


def refuse_longer(lengths: Sequence[int], max_positions: int | None, name: str, num_before: int = 0) -> None:
    """Raises a DataError for a line that is longer than a model with learned positions can take."""
    for line, length in enumerate(lengths, start=num_before + 1):
        if max_positions is not None and length > max_positions:
            raise DataError(
                f"{name}, line {line}: {length} tokens, but the model learns only {max_positions} positions "
                "(model.max_positions), and no pair of it is left out; cut the line into shorter sentences, or remove it"
            )
