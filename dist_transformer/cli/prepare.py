"""prepare: from text to a prepared corpus, once."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dist_transformer.cli.arguments import Overrides, RunArgument, read_run
from dist_transformer.config.models import Config
from dist_transformer.errors import EXIT_REQUEUE
from dist_transformer.stop_request import StopRequest

if TYPE_CHECKING:  # at run time it would import numpy for every command
    from dist_transformer.data.manifest import Manifest


def prepare_command(run: RunArgument, overrides: Overrides = None) -> None:
    """Filter, tokenize and shuffle the corpora of a configuration into shards; `train` does it by itself if need be."""
    config, _ = read_run(run, overrides)
    folder, manifest = prepare_with_progress(config)
    for name, split in manifest.splits.items():
        dropped = ", ".join(f"{rule} {count}" for rule, count in split.dropped.items() if count) or "none"
        print(
            f"{name}: {split.rows:,} of {split.read_rows:,} pairs kept (dropped: {dropped}), "
            f"{split.source_tokens:,} source + {split.target_tokens:,} target tokens"
        )
    print(f"prepared corpus: {folder}  (digest {manifest.digest[:12]})")


def prepare_with_progress(config: Config, stop: StopRequest | None = None) -> "tuple[Path, Manifest]":
    """Prepares what is not prepared yet, with a progress bar on a terminal; returns the folder and its manifest.

    A stop request ends the process with EXIT_REQUEUE: what is done is kept, and the next start goes on.
    """
    from rich.console import Console
    from rich.progress import Progress

    from dist_transformer.data.prepare import prepare, prepared_folder

    folder = prepared_folder(config)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        tasks = {}

        def show(stage: str, rows_done: int, rows_total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage)
            if stop is not None and (reason := stop.reason()):
                print(f"stopped while preparing the corpus ({reason}); the same command goes on", file=sys.stderr)
                sys.exit(EXIT_REQUEUE)
            bar.update(tasks[stage], completed=rows_done, total=rows_total)

        manifest = prepare(config, folder, show)
    return folder, manifest
