"""The data of a run: its prepared corpus, the plan of its batches, and the position from which a checkpoint resumes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dist_transformer.config.loading import flatten
from dist_transformer.config.schema import Config
from dist_transformer.data.loader.loader import STALL_SHARE, LaneLoader, MicroBatch, micro_batches
from dist_transformer.data.loader.mixture import refuse_undrawn, stages
from dist_transformer.data.loader.partition import Planner
from dist_transformer.data.loader.position import Position, position_from_json
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.window import WindowBuilder
from dist_transformer.data.loader.workers import LoaderSettings
from dist_transformer.data.manifest import Manifest, content_digest, json_digest, verify_shards
from dist_transformer.data.prepare.scan import LARGE_GROUP_WINDOWS, load_tokenizer
from dist_transformer.data.recipe import FORMATS, recipe_of_format
from dist_transformer.errors import CheckpointError, DataError
from dist_transformer.files import file_sha256
from dist_transformer.run.resume_checks import differs, recipe_of_checkpoint, recipe_settings
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.checkpoint.tensor_files import STATE

DIGEST_DIGITS = 16


@dataclass(frozen=True)
class RunData:
    """The prepared corpus, and its division into micro-batches by this run."""

    config: Config
    folder: Path
    manifest: Manifest

    @cached_property
    def planner(self) -> Planner:
        return self.planner_of(self.config.data.lanes)

    def planner_of(self, num_lanes: int) -> Planner:
        """Returns the planner for a number of lanes, which a checkpoint may have other than the configuration."""
        splits = [self.manifest.splits[name] for name in self.manifest.training]
        group_rows = tuple(tuple(group.rows for group in split.row_groups) for split in splits)
        begun = stages(self.config.data, [split.rows for split in splits])
        return Planner(group_rows, num_lanes, self.config.data.window_rows, self.config.run.seed, begun)

    @cached_property
    def reader(self) -> RowReader:
        config = self.config
        return RowReader(self.folder, self.manifest, config.data, config.tokenizer.sampling, config.run.seed)

    @cached_property
    def builder(self) -> WindowBuilder:
        return WindowBuilder(self.reader, self.config.data.token_budget(), self.manifest.special, self.config.run.seed)

    def validation(self) -> Iterator[MicroBatch]:
        """Yields every row of the validation corpus once, in micro-batches of similar lengths; none without one."""
        if "validation" in self.manifest.splits:
            for rows in self.reader.read_split("validation"):
                yield from micro_batches(self.builder.build_rows(rows), 0, self.manifest.bos_id)

    def start(self) -> Position:
        """Returns the position before the first batch."""
        return Position.start(self.planner.first_partition())

    def loader(
        self,
        position: Position,
        batch: int,
        rank: int,
        num_ranks: int,
        num_workers: int,
        progress: Callable[[], None] = lambda: None,
    ) -> LaneLoader:
        """Returns the loader of one rank. `batch`: number of the next global batch; `progress`: called for a window."""
        settings = LoaderSettings(self.manifest.bos_id, num_workers, STALL_SHARE * self.config.training.hang_seconds)
        lanes = range(rank, self.config.data.lanes, num_ranks)
        return LaneLoader(self.builder, self.planner, position, batch, lanes, settings, progress)

    def recipe(self) -> dict[str, Any]:
        """Returns the values that a resume must find unchanged: model shape, prepared corpus and order of the data."""
        manifest = self.manifest
        return {
            **recipe_settings(self.config),
            "source_vocabulary": manifest.source_vocabulary,
            "target_vocabulary": manifest.target_vocabulary,
            "pad_id": manifest.pad_id,
            "eos_id": manifest.eos_id,
            "source tokenizer": manifest.tokenizer.source_sha256[:DIGEST_DIGITS],
            "target tokenizer": manifest.tokenizer.target_sha256[:DIGEST_DIGITS],
            # Of a list, the files of a corpus, which may be long, its digest.
            **{
                f"prepared with {key}": json_digest(value)[:DIGEST_DIGITS] if isinstance(value, list) else value
                for key, value in flatten(manifest.recipe).items()
            },
            "prepared corpus": manifest.digest,
        }

    @cached_property
    def libraries(self) -> dict[str, dict[str, str]]:
        """Libraries whose version decides the order of the rows: the version, and a digest of its results."""
        return {name: {"version": version(name), "probe": probe} for name, probe in self.reader.probes().items()}

    def position_of(self, checkpoint: Checkpoint) -> Position:
        """Returns the position from which `checkpoint` resumes, cut into other lanes if data.reslice_from allows that.
        Raises CheckpointError: another version wrote it, or the order of the data has changed; DataError: a stage has no pair."""
        position = position_from_json(checkpoint.state["position"], str(checkpoint.path / STATE))
        lanes_before = len(position.lanes)
        allowed = {"data.lanes"} if lanes_before == self.config.data.reslice_from else set()
        _refuse_changes(checkpoint, self._recipe_beside(checkpoint), allowed)
        self._refuse_other_libraries(checkpoint)
        self._refuse_other_shares(checkpoint, position)
        schedule = flatten(self.config.model_dump(mode="json")).get("data.mixture.schedule")
        if flatten(checkpoint.state).get("settings.data.mixture.schedule", schedule) != schedule:
            refuse_undrawn(self.config.data.mixture, self.planner)  # a run that has such a stage already goes on
        if lanes_before == self.config.data.lanes:
            return position
        partition = self.planner_of(lanes_before).repartition(
            position.partition, position.lanes, checkpoint.state["batches"], self.config.data.lanes
        )
        return replace(position, partition=partition, lanes=Position.start(partition).lanes)

    def _recipe_beside(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns `recipe`; as of a former format, if the checkpoint's corpus was of that, and has the same files here."""
        here, wanted = self.manifest, checkpoint.state["recipe"].get("prepared corpus")
        is_in_place = any(shard.is_in_place for split in here.splits.values() for shard in split.shards)
        for number in () if is_in_place else FORMATS[1:]:  # files in place are read by the rules of this one
            former = recipe_of_format(number, here.recipe, self.config)
            if content_digest(former, here.tokenizer, here.splits, here.training) == wanted:
                return replace(self, manifest=replace(here, recipe=former, digest=wanted)).recipe()
        return self.recipe()

    def _refuse_other_libraries(self, checkpoint: Checkpoint) -> None:
        """Refuses changed libraries; those that an older checkpoint does not name are taken as unchanged."""
        before = checkpoint.state.get("libraries", {})
        changed = [name for name, now in self.libraries.items() if before.get(name, now)["probe"] != now["probe"]]
        if changed:
            versions = [f"{name} {self.libraries[name]['version']}, not {before[name]['version']}" for name in changed]
            install = " ".join(f"{name}=={before[name]['version']}" for name in changed)
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed, since rows would come twice or never: they are put in order and "
                f"cut into pieces by {' and '.join(versions)} with which it was trained, and the two do it differently. Resume "
                f"after pip install {install}, or give the run another run.name."
            )

    def _refuse_other_shares(self, checkpoint: Checkpoint, position: Position) -> None:
        batches, partition = checkpoint.state["batches"], position.partition
        before, now = partition.shares, self.planner.stage_at(max(batches - 1, 0), partition.streams).shares
        if batches and before != now:
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed, since the shares of the corpora have changed for steps that "
                f"are already trained: {_shares_text(before)} then, {_shares_text(now)} now. Put data.mixture back, and "
                f"give new weights in data.mixture.schedule from step {batches + 1} on."
            )


def open_run_data(config: Config, folder: Path, manifest: Manifest) -> RunData:
    """Opens the data of a run. DataError: shards are missing, fewer pairs than lanes, or the tokenizer is another one."""
    verify_shards(folder, manifest)
    _refuse_other_tokenizer(folder, manifest)
    rows = sum(manifest.splits[name].rows for name in manifest.training)
    if rows < config.data.lanes:
        raise DataError(
            f"the training corpus has {rows} pairs after filtering, fewer than data.lanes = {config.data.lanes}: "
            "each lane needs a row; lower data.lanes or add text"
        )
    return RunData(config, folder, manifest)


def row_groups_warning(config: Config, manifest: Manifest) -> str:
    """Returns a warning if windows read many times their rows, since they read a row group of each corpus whole, or ""."""
    splits = [manifest.splits[name] for name in manifest.training]
    largest = [max((g.rows for g in split.row_groups), default=0) for split in splits]
    read, limit = sum(largest), LARGE_GROUP_WINDOWS * config.data.window_rows
    said = f"a window of {config.data.window_rows} rows reads row groups of {read} rows: give a new run data.window_rows of "
    said += f"{-(-read // LARGE_GROUP_WINDOWS)}, or prepare with data.row_group_rows of {max(1, limit // len(largest))}"
    return said if read > limit and not any(shard.is_in_place for split in splits for shard in split.shards) else ""


def _refuse_other_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Raises DataError if the tokenizer is not the one that the corpus was prepared with, nor as large as is said."""
    files = manifest.tokenizer
    loaded = load_tokenizer(folder, files)
    names = ("source_vocabulary", "target_vocabulary", "pad_id", "bos_id", "eos_id")
    expected = [files.source_sha256, files.target_sha256, *(getattr(manifest, name) for name in names)]
    found = [*map(file_sha256, (folder / files.source, folder / files.target)), *(getattr(loaded, n) for n in names)]
    if found != expected:
        raise DataError(
            f"{folder}: its tokenizer is not the one that the manifest describes: expected {expected}, got {found}. Delete "
            f"{folder} and prepare again."
        )


def _refuse_changes(checkpoint: Checkpoint, recipe: Mapping[str, Any], allowed: set[str]) -> None:
    before = recipe_of_checkpoint(checkpoint.state["recipe"])
    changed = [key for key in sorted({*before, *recipe}) if differs(key, before, recipe) and key not in allowed]
    if changed:
        lines = [f"  {key}: {before.get(key)} -> {recipe.get(key)}" for key in changed]
        hint = f" Or set data.reslice_from={before.get('data.lanes')} to cut the rest of the epoch into other lanes."
        folder = flatten(checkpoint.state).get("settings.data.prepared")
        restore = f"The run has a corpus of another version: restore {folder}, or prepare it with that version"
        back = restore if "prepared with format" in changed else "Put them back"
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed, since these have changed:\n" + "\n".join(lines) + "\n"
            f"{back}, or give the changed run another run.name.{hint if changed == ['data.lanes'] else ''}"
        )


def _shares_text(shares: tuple[int, ...] | None) -> str:
    return "by their pairs" if shares is None else " : ".join(f"{share / sum(shares):.3g}" for share in shares)
