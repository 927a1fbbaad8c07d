"""The global batch of a step as in training, without an engine and without ranks, and its tables: for `data inspect`."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dist_transformer.data.loader.batching import straggler_ratio
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.position import Position, Quarantined, position_from_json
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, digest_text
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.format import progress_bar, table
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.checkpoint.tensor_files import STATE, read_state
from dist_transformer.training.global_batch import next_with_pairs
from dist_transformer.training.run_data import RunData

HEADER = ("lane", "rows", "source", "target", "pairs", "real", "padded", "padding", "pairs by corpus")
"""Columns: `source`, `target`: padded lengths; `real`, `padded`: tokens."""


@dataclass(frozen=True)
class SeenBatch:
    """One global batch.

    Attributes:
        beginning: start of the walk to it: a checkpoint, or the first step.
        dropped: pairs dropped by rule from the windows begun for it.
        quarantined: row groups quarantined in these windows.
    """

    step: int
    epoch: int
    beginning: str
    micro_batches: list[MicroBatch]
    dropped: Counter[str]
    quarantined: tuple[Quarantined, ...]

    @property
    def pairs(self) -> int:
        return sum(batch.shape.pairs for batch in self.micro_batches)

    @property
    def digest(self) -> str:
        """Digest of the batch, as in metrics.jsonl."""
        return digest_text(sum(batch.digest() for batch in self.micro_batches))

    @property
    def straggler_ratio(self) -> float:
        """Ratio of the padded tokens of the largest micro-batch to the mean."""
        return straggler_ratio([batch.shape.padded_tokens for batch in self.micro_batches])


def batch_of_step(data: RunData, run_dir: RunDir | None, step: int | None) -> SeenBatch:
    """Returns the batch of this step; None: of the next one. Changes nothing in the run folder.

    Raises:
        UserError: the run has no such step.
        CheckpointError: the step was trained with other lanes, or the run cannot be resumed.
        DataError: a row group cannot be read.
    """
    kept = _checkpoints(run_dir) if run_dir is not None else []
    newest = kept[-1] if kept else None
    step = step if step is not None else 1 + (newest.state["batches"] if newest else 0)
    _refuse_step_outside(data, step, newest)
    beginning = next((c for c in reversed(kept) if c.state["batches"] < step), None)
    if following := next((c for c in kept if c.state["batches"] >= step), None):
        _refuse_other_lanes(data, step, beginning, following)
    name = f"checkpoint {beginning.path.name}" if beginning else "the first step"
    first = beginning.state["batches"] if beginning else 0
    batches = _batches(data, _position(data, beginning, newest), first, name)
    with progress_bar() as show:
        for done in range(1, step - first + 1):
            seen = next(batches)
            show(f"from {name}", done, step - first)
    return seen


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


def _batches(data: RunData, position: Position, step: int, beginning: str) -> Iterator[SeenBatch]:
    """Yields the global batches after `step` as the loop takes them, all lanes in one process; UserError at the end."""
    most_epochs = data.config.training.max_epochs
    loader = data.loader(position, step, rank=0, num_ranks=1, num_workers=0)

    def fetch() -> SeenBatch:
        if loader.must_repartition(step):
            loader.repartition(list(loader.lane_positions().values()), step)
        local = loader.next_step()
        batches = [batch for batch in local.batches if batch is not None]
        return SeenBatch(step + 1, loader.partition.epoch, beginning, batches, local.dropped, local.quarantined)

    def start_epoch() -> None:
        loader.start_epoch(step)

    while (seen := next_with_pairs(fetch, start_epoch, most_epochs)) is not None:
        step = seen.step
        yield seen
    raise _beyond_the_end("max_epochs", most_epochs or 0, step)


def _checkpoints(run_dir: RunDir) -> list[Checkpoint]:
    """Returns the checkpoints of the run folder whose state can be read, oldest first."""
    found = []
    for path in checkpoints.saved(run_dir):
        try:
            found.append(Checkpoint(path, read_state(path)))
        except (OSError, ValueError, CheckpointError) as error:
            print(f"{path} is left out: its state.json cannot be read ({error})", file=sys.stderr)
    return found


def _position(data: RunData, beginning: Checkpoint | None, newest: Checkpoint | None) -> Position:
    """Returns the position to begin from. Row groups that the run has quarantined stay so, even if fixed since."""
    position = data.start() if beginning is None else data.position_of(beginning)
    if newest is not None:
        where = str(newest.path / STATE)
        position = replace(position, quarantined=position_from_json(newest.state["position"], where).quarantined)
    return position


def _refuse_step_outside(data: RunData, step: int, newest: Checkpoint | None) -> None:
    if step < 1:
        raise UserError(f"--step {step}: steps count from 1")
    max_steps = data.config.training.max_steps
    skipped = newest.state["skipped_updates"] if newest else 0
    if max_steps is not None and step > max_steps + skipped:
        raise _beyond_the_end("max_steps", max_steps, max_steps + skipped)


def _beyond_the_end(setting: str, value: int, last: int) -> UserError:
    return UserError(
        f"the run ends after step {last}, by training.{setting} = {value}. Give --step {last} or a smaller one, or look "
        f"beyond with a larger training.{setting}."
    )


def _refuse_other_lanes(data: RunData, step: int, beginning: Checkpoint | None, following: Checkpoint) -> None:
    lanes, before = data.config.data.lanes, data.config.data.reslice_from
    had = len(following.state["position"]["lanes"])
    if had != lanes:
        raise CheckpointError(
            f"step {step} was trained with {had} lanes, as {following.path.name} says, and data.lanes is {lanes} now. To "
            f"see it as it was, give data.lanes={had} data.reslice_from=null."
        )
    if beginning is None and before is not None:
        raise CheckpointError(
            f"step {step} was trained after the run was cut from {before} into {lanes} lanes, and the checkpoint where that "
            "happened is not kept any more: what the step saw is not known."
        )


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
