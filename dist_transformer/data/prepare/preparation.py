"""Prepares a corpus from text, once, by any number of processes that share a folder.

    start       one process for all: scan, tokenizer (scan.py)
    keys        where a rule asks for it, chunk by chunk: keys of the pairs; then, part by part, those that repeat others
                (duplicates.py)
    train ...   chunk by chunk: tokenized, filtered, written to a spill file sorted by random keys
    validation  chunk by chunk, in order, directly to shards
    shuffle     shard by shard: one range of the keys of a corpus gathered from all its spill files
    end         one process for all: report (report.py), manifest.json

Chunks and ranges are claimed as in claims.py; a killed preparation resumes with those that have no result. docs/data.md has
the user's view. `manifest.json` is written last: a folder that has one is complete.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.loading import flatten
from dist_transformer.config.paths import is_address
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import HELD_OUT_NAME
from dist_transformer.data.manifest import (
    MANIFEST_NAME,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    Manifest,
    Split,
    content_digest,
    json_digest,
)
from dist_transformer.data.prepare import chunks
from dist_transformer.data.prepare.chunks import Units
from dist_transformer.data.prepare.claims import WAITING, WORK_FOLDER, WorkFinishedError
from dist_transformer.data.prepare.report import write_report
from dist_transformer.data.prepare.scan import ReportProgress, Start, at_commits, load_tokenizer
from dist_transformer.data.prepare.state import STATE_NAME, PrepareState
from dist_transformer.data.recipe import (
    FORMATS,
    differences,
    make_recipe,
    recipe_of_format,
    recipe_without_beginnings,
    recipe_without_corpora,
    refuse_other_recipe,
)
from dist_transformer.data.sources.files import has_address, is_text_at_hand
from dist_transformer.errors import DataError, MachineError
from dist_transformer.run.attempts import newest_checkpoint
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import check_output, writing
from dist_transformer.run.records import read_record

FOLDER_DIGITS = 16
LOCK_NAME = ".prepare.lock"
LOCK_ATTEMPT_SECONDS = 1.0
_PART_OF_WORK = re.compile(
    r"(locks|spill|hashes)(/[^/]+\.(lock|parquet|npy|tmp))?|(state|repeated|.+-(chunk-\d+|range-\d+|end))\.json|\.[^/]+\.tmp"
)
"""Names of all that a preparation makes in its work folder (claims.py)."""
ReadRecipe = Callable[[], dict[str, Any]]  # `make_recipe` of the configuration, which looks into every file once
log = logging.getLogger(__name__)


def prepare(
    config: Config,
    folder: Path | None = None,
    progress: ReportProgress = lambda stage, rows_done, rows_total: None,
    threads: int | None = None,
    recipe: ReadRecipe | None = None,
) -> Manifest:
    """Prepares the corpus of `config` in `folder` (default: `prepared_folder`), unless it is complete.

    Several processes that call it at once, on any machines with access to the folder, share the work.
    DataError for a corpus or tokenizer that cannot be used, and for a folder that was prepared with another recipe.

    `threads`: number of threads that tokenize; None: the number of cores.
    """
    recipe = recipe or cache(partial(make_recipe, config))
    folder = folder or prepared_folder(config, recipe)
    if manifest := _complete_manifest(config, folder, recipe):
        _clear_away(folder / WORK_FOLDER)  # the process that completed it was killed
        return manifest
    recipe()  # the errors of the text come before anything is written
    begun = folder / LOCK_NAME, folder / WORK_FOLDER / STATE_NAME
    check_output(folder, "a prepared corpus", lambda _: any(map(Path.is_file, begun)))
    threads = threads or len(os.sched_getaffinity(0))
    with _only_process(folder, progress):
        if manifest := _complete_manifest(config, folder, recipe):
            return manifest
        state = Start(config, folder, folder / WORK_FOLDER, progress, chunks.BATCH_ROWS, threads).run(recipe())
    try:
        units = Units(at_commits(config, state.commits), folder, state, progress, threads)
        made = units.make_chunks()
        corpora = units.corpora(made, units.make_ranges(made))
        with _only_process(folder, progress):
            if (folder / MANIFEST_NAME).exists():
                return Manifest.load(folder)
            progress("report", 0, None)
            _refuse_changed_text(config, folder, state.recipe)
            write_report(folder, config.data.filters.plugin, corpora)
            return _completed(config, state, folder, {name: corpus.split for name, corpus in corpora.items()})
    except WorkFinishedError:
        return Manifest.load(folder)


def prepared_folder(config: Config, recipe: ReadRecipe | None = None) -> Path:
    """Returns `data.prepared`, or a folder in `run.root` named by the recipe's digest; DataError for a missing file.

    MachineError if the server of a text does not answer. A run that has checkpoints keeps its folder, whatever is held
    out now. The path is absolute: pyarrow takes `exp:1/corpus` for an address.
    """
    if config.data.prepared is not None:
        return Path(config.data.prepared).absolute()
    recipe = recipe or cache(partial(make_recipe, config))
    with suppress(DataError):  # it was prepared otherwise
        if (of_run := _corpus_of_run(config, Path(config.run.root))) and _complete_manifest(config, of_run, recipe):
            return of_run
    try:
        found = recipe()
    except (DataError, MachineError) as error:
        if not is_address(str(error)):
            raise
        hint = "The name of a prepared corpus depends on its text; to use one that is complete: data.prepared=FOLDER"
        raise type(error)(f"{error}\n{hint}") from error
    digests = (json_digest(recipe_of_format(version, found, config))[:FOLDER_DIGITS] for version in FORMATS)
    folder, *older = (Path(config.run.root).absolute() / "prepared" / digest for digest in digests)
    return folder if folder.exists() else next((each for each in older if (each / MANIFEST_NAME).is_file()), folder)


def refuse_other_corpus(config: Config, recipe: ReadRecipe | None = None) -> None:
    """Raises DataError if the corpus of the newest checkpoint was prepared otherwise. Of remote text only settings count."""
    folder = _corpus_of_run(config, Path(config.run.root))
    if folder and folder == Path(config.data.prepared or folder).absolute():
        is_remote = any(has_address(corpus, config.data) for corpus in _corpora(config))
        recipe = partial(recipe_without_corpora, config) if is_remote else recipe or partial(make_recipe, config)
        _complete_manifest(config, folder, recipe)


def _corpus_of_run(config: Config, root: Path) -> Path | None:
    """Returns the prepared corpus of the newest checkpoint that the run has in this run.root; None without one."""
    run_dir = RunDir(root.absolute() / config.run.name)
    with suppress(OSError, MachineError):  # the start of the run tells it
        state = run_dir.checkpoints / (newest_checkpoint(run_dir) or "") / "state.json"
        given = flatten(read_record(state)).get("settings.data.prepared")
        return run_dir.prepared(given) if isinstance(given, str) else None
    return None


def _complete_manifest(config: Config, folder: Path, read_recipe: ReadRecipe) -> Manifest | None:
    if not (folder / MANIFEST_NAME).exists():
        return None
    manifest = Manifest.load(folder)
    recipe = recipe_of_format(manifest.recipe.get("format"), _recipe_now(config, folder, read_recipe), config)
    if "modifiers" not in manifest.recipe["tokenizer"]:  # modified text may be read from any folder
        recipe = recipe | {"tokenizer": {key: each for key, each in recipe["tokenizer"].items() if key != "modifiers"}}
    if "beginning_sha256" not in str(manifest.recipe):
        recipe = recipe_without_beginnings(recipe)
    roots = (Path(config.run.root), folder.parent.parent)  # the latter: the run was moved with its corpus
    if any(_corpus_of_run(config, root) == folder for root in roots):
        recipe = {key: value for key, value in recipe.items() if key != "held_out"}
    refuse_other_recipe(folder, manifest.recipe, recipe)
    return manifest


def _recipe_now(config: Config, folder: Path, read_recipe: ReadRecipe) -> dict[str, Any]:
    """Returns the recipe, or if the text is gone, or its server does not answer, its part without corpora."""
    try:
        if all(is_text_at_hand(corpus, config.data) for corpus in _corpora(config)):
            return read_recipe()
    except (DataError, MachineError) as error:
        if not is_address(str(error)):
            raise
        log.warning("%s: used as it is; whether its text has changed is not known: %s", folder, error)
    return recipe_without_corpora(config)


def _corpora(config: Config) -> tuple[CorpusConfig, ...]:
    return (*config.data.training_corpora().values(), *config.data.held_out_corpora().values())


def _refuse_changed_text(config: Config, folder: Path, begun_with: dict[str, Any]) -> None:
    """Raises a DataError if a text has changed since the preparation began; what was made of it is removed."""
    if lines := differences(begun_with, _recipe_now(config, folder, partial(make_recipe, config))):
        (folder / HELD_OUT_NAME).unlink(missing_ok=True)
        _clear_away(folder / WORK_FOLDER)
        raise DataError(f"{folder}: its text changed while it was prepared:\n{lines}\nStart again.")


def _clear_away(work: Path) -> None:
    """Removes the work folder, unless something in it is not ours."""
    with suppress(FileNotFoundError):  # another process is removing it
        found = [str(each.relative_to(work)) for each in work.rglob("*")]
        if found and all(map(_PART_OF_WORK.fullmatch, found)):
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _only_process(folder: Path, progress: ReportProgress) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_NAME, fallback_to_soft=False)
    while not lock.is_locked:
        with writing(folder):
            try:
                lock.acquire(timeout=LOCK_ATTEMPT_SECONDS)
            except Timeout:
                progress(WAITING, 0, None)
    try:
        yield
    finally:
        lock.release()


def _completed(config: Config, state: PrepareState, folder: Path, splits: dict[str, Split]) -> Manifest:
    """Writes the manifest, and removes the work folder."""
    assert state.tokenizer is not None
    tokenizer = load_tokenizer(folder, state.tokenizer)
    training = tuple(config.data.training_corpora())
    names = ("source_vocabulary", "target_vocabulary", "pad_id", "bos_id", "eos_id")
    manifest = Manifest(
        digest=content_digest(state.recipe, state.tokenizer, splits, training),
        recipe=state.recipe,
        tokenizer=state.tokenizer,
        **{name: getattr(tokenizer, name) for name in names},
        source_language=config.data.source_language,
        target_language=config.data.target_language,
        splits=splits,
        training=training,
        commits=state.commits,
    )
    for part in (folder / SHARD_FOLDER, folder / TOKENIZER_FOLDER):
        for torn in part.glob(".*.tmp"):  # half-written files of killed processes
            torn.unlink()
    manifest.save(folder)
    _clear_away(folder / WORK_FOLDER)
    return manifest
