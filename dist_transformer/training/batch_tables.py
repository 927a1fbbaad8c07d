"""Output of a global batch for people: a table by lane and, for some rows, their ids as text and as pieces."""

from collections.abc import Sequence

from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.window_request import CORPUS_SHIFT
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.format import table
from dist_transformer.training.inspect_batch import SeenBatch

HEADER = ("lane", "rows", "source", "target", "pairs", "real", "padded", "padding", "pairs by corpus")
"""Columns: `source`, `target`: padded lengths; `real`, `padded`: tokens."""


def print_batch(seen: SeenBatch, manifest: Manifest) -> None:
    """Prints sizes by lane and in all, the digest, dropped pairs and quarantined row groups."""
    shapes = [batch.shape for batch in seen.micro_batches]
    counts = [batch.pairs_by_corpus(len(manifest.training)) for batch in seen.micro_batches]
    real, padded = sum(map(_real_tokens, seen.micro_batches)), sum(shape.padded_tokens for shape in shapes)
    print(f"step {seen.step} of epoch {seen.epoch}, found from {seen.beginning}")
    lanes = zip(seen.micro_batches, counts, strict=True)
    print(*table(HEADER, [_cells(*lane, manifest) for lane in lanes]), sep="\n")
    by_corpus = _by_corpus([sum(column) for column in zip(*counts, strict=True)], manifest)
    print(f"in all        {sum(shape.pairs for shape in shapes)} pairs: {by_corpus}")
    target = sum(shape.target_tokens for shape in shapes)
    print(f"tokens        {target} target; {real} real of {padded} padded, padding {_share(real, padded)}, ", end="")
    print(f"straggler ratio {seen.straggler_ratio:.3f}")
    print(f"batch digest  {seen.digest}")
    for rule, count in sorted(seen.dropped.items()):
        print(f"dropped       {count} pairs by {rule} from the windows that begin here")
    for quarantined in seen.quarantined:
        print(f"quarantined   {quarantined.place}, of lane {quarantined.key.lane}: {quarantined.reason}")


def print_rows(seen: SeenBatch, manifest: Manifest, tokenizer: Tokenizer, lane: int | None, count: int) -> None:
    """Prints the first `count` rows of a lane; None: of the first lane with rows."""
    batch = next((batch for batch in seen.micro_batches if lane in (None, batch.lane)), None)
    if batch is None:
        print(f"\nlane {lane} has no row at this step")
        return
    for row in range(min(count, batch.shape.pairs)):
        source = _ids(batch.source_BS[row].tolist(), tokenizer.source_end)
        target = _ids(batch.target_out_BT[row].tolist(), tokenizer.eos_id)
        row_id = int(batch.row_ids[row])
        name, number = manifest.training[row_id >> CORPUS_SHIFT], row_id & ((1 << CORPUS_SHIFT) - 1)
        print(f"\nlane {batch.lane}, row {row}: {name}:{number}, {len(source)} source and {len(target)} target tokens")
        print(f"  source  {tokenizer.decode_source(source)}\n          {' '.join(tokenizer.source_pieces(source))}")
        print(f"  target  {tokenizer.decode_target(target)}\n          {' '.join(tokenizer.target_pieces(target))}")


def _cells(batch: MicroBatch, counts: Sequence[int], manifest: Manifest) -> tuple[str, ...]:
    shape, real = batch.shape, _real_tokens(batch)
    numbers = (batch.lane, shape.rows, shape.source_length, shape.target_length, shape.pairs, real, shape.padded_tokens)
    return (*map(str, numbers), _share(real, shape.padded_tokens), _by_corpus(counts, manifest))


def _real_tokens(batch: MicroBatch) -> int:
    return batch.shape.source_tokens + batch.shape.target_tokens


def _share(real: int, padded: int) -> str:
    return f"{1 - real / padded:.1%}"


def _by_corpus(counts: Sequence[int], manifest: Manifest) -> str:
    return ", ".join(f"{name} {count}" for name, count in zip(manifest.training, counts, strict=True))


def _ids(padded: list[int], end: int) -> list[int]:
    """Returns the ids of a row up to its end of sentence."""
    return padded[: padded.index(end) + 1]
