"""Preparation with a progress bar, by this process and further ones of this machine."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.config.schema import Config
from dist_transformer.errors import EXIT_REQUEUE, DistTransformerError, MachineError, UserError
from dist_transformer.format import progress_bar
from dist_transformer.processes.launching import threads_per_rank
from dist_transformer.processes.stop_request import StopRequest, end_with_parent, ignore_stop_signals
from dist_transformer.run.outputs import is_misplaced

if TYPE_CHECKING:  # at run time it would import numpy for every command
    from dist_transformer.data.manifest import Manifest
    from dist_transformer.data.prepare.preparation import ReadRecipe


def prepare_for_training(config: Config, stop: StopRequest) -> "tuple[Path, Manifest]":
    """`prepare_with_progress`; a corpus that the checkpoints of the run could not go on with is refused before (DataError)."""
    from dist_transformer.data.prepare.preparation import refuse_other_corpus
    from dist_transformer.data.recipe import make_recipe

    recipe = cache(partial(make_recipe, config))
    refuse_other_corpus(config, recipe)
    return prepare_with_progress(config, stop, recipe=recipe)


def prepare_with_progress(
    config: Config, stop: StopRequest | None = None, processes: int = 1, recipe: "ReadRecipe | None" = None
) -> "tuple[Path, Manifest]":
    """Prepares the corpus unless it is complete, with a progress bar on a terminal; returns its folder and manifest.

    A stop request ends the process with EXIT_REQUEUE: finished units are kept, and the next start resumes.

    Args:
        processes: number of processes of this machine that share the work; if more than 1, `stop` must listen.
        recipe: reads the text's fingerprints.
    """
    from dist_transformer.data.prepare.claims import WAITING
    from dist_transformer.data.prepare.preparation import prepare, prepared_folder
    from dist_transformer.data.recipe import make_recipe

    recipe = recipe or cache(partial(make_recipe, config))
    folder = prepared_folder(config, recipe)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks of a machine all prepare
    threads = threads_per_rank(processes * ranks)
    with progress_bar() as draw:
        seen = set()

        def show(stage: str, rows_done: int, rows_total: int | None) -> None:
            if stage == WAITING and stage not in seen and not sys.stderr.isatty() and "RANK" not in os.environ:
                print(f"{WAITING} that prepares {folder} too", file=sys.stderr, flush=True)
            seen.add(stage)
            if stop is not None and (reason := stop.reason()):
                print(f"stopped while preparing the corpus ({reason}); the same command resumes it", file=sys.stderr)
                sys.exit(EXIT_REQUEUE)
            draw(stage, rows_done, rows_total)

        with _helpers(config, folder, processes - 1, threads), _disk_errors_explained(folder):
            manifest = prepare(config, folder, show, threads, recipe)
    return folder, manifest


@contextmanager
def _disk_errors_explained(folder: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ArrowException) as error:
        raise (UserError if is_misplaced(error) else MachineError)(
            f"{folder}: preparing the corpus failed: {type(error).__name__}: {error}. Is its disk full, closed to this "
            "user, or gone? What is done is kept: start the same command again when it is repaired"
        ) from error


@contextmanager
def _helpers(config: Config, folder: Path, count: int, threads: int) -> Iterator[None]:
    """Starts further processes that prepare; they end with the block, and with this process however it ends."""
    context = multiprocessing.get_context("forkserver")  # since `listen` it ignores stop signals, as do its children
    helpers = [context.Process(target=_help, args=(config, folder, threads), daemon=True) for _ in range(count)]
    for helper in helpers:
        helper.start()
    try:
        yield
    except BaseException:
        for helper in helpers:
            helper.kill()
        raise
    finally:
        for helper in helpers:
            helper.join()


def _help(config: Config, folder: Path, threads: int) -> None:
    """Main function of a helper. Does not report errors: the first process meets and reports the same ones."""
    from dist_transformer.data.prepare.preparation import prepare

    ignore_stop_signals()
    end_with_parent()
    with suppress(DistTransformerError):
        prepare(config, folder, threads=threads)
