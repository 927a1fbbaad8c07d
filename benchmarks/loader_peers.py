"""Other loaders on the same rows: they yield rows one by one, neither bucketed nor padded nor as tensors.

`datasets` reads our own parquet shards as a stream, in their order. litdata reads its own chunks, made here from our
shards, and shuffles; it is optional: `pip install litdata` into an environment of its own.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
import pyarrow.parquet as pq
from common import Figures, Stopwatch, rates

BATCH_ROWS = 256
CHUNK_BYTES = "8MB"
Row = dict[str, Any]


def datasets_rows(files: Sequence[str], cache: Path, num_rows: int) -> Figures:
    """Measures the first rows of the files, streamed in this process."""
    rows = datasets.load_dataset("parquet", data_files=list(files), split="train", streaming=True, cache_dir=str(cache))
    return _timed(rows, num_rows, with_descendants=False)


def has_litdata() -> bool:
    return find_spec("litdata") is not None


def write_litdata(files: Sequence[str], folder: Path) -> None:
    """Writes the rows of the files as litdata's own chunks."""
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES)
    for number, row in enumerate(itertools.chain.from_iterable(map(_rows_of, files))):
        cache[number] = row
    cache.done()
    cache.merge()


def litdata_rows(folder: Path, num_rows: int, num_workers: int) -> Figures:
    """Measures the first rows of a shuffled epoch, from this process or through a worker."""
    import litdata

    rows = litdata.StreamingDataset(str(folder), shuffle=True)
    if num_workers == 0:
        return _timed(rows, num_rows, with_descendants=False)
    loader = litdata.StreamingDataLoader(rows, batch_size=BATCH_ROWS, num_workers=num_workers, collate_fn=list)
    return _timed(itertools.chain.from_iterable(loader), num_rows, with_descendants=True)


def _timed(rows: Iterable[Row], num_rows: int, with_descendants: bool) -> Figures:
    """Measures from the first row on, without the start of a worker; some rows must be left, as it must still live."""
    stream = (row for row in rows)
    next(stream)
    clock, pairs, tokens = Stopwatch(with_descendants), 0, 0
    for row in itertools.islice(stream, num_rows):
        pairs += 1
        tokens += len(row["source"]) + len(row["target"])
    return rates(pairs, tokens, *clock.read())


def _rows_of(file: str) -> Iterator[Row]:
    shard = pq.ParquetFile(file)
    for group in range(shard.num_row_groups):
        table = shard.read_row_group(group)
        for source, target in zip(table.column("source"), table.column("target"), strict=True):
            yield {"source": np.asarray(source.values), "target": np.asarray(target.values)}
