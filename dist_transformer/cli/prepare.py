"""prepare: makes a prepared corpus of text, once, by one process or many."""

from contextlib import suppress
from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, RunArgument, read_run
from dist_transformer.data.prepare.progress import prepare_with_progress
from dist_transformer.processes.stop_request import StopRequest

Processes = Annotated[
    int, typer.Option(min=1, help="Processes on this machine that share the work; as many as it has cores is fastest.")
]


def prepare_command(run: RunArgument, overrides: Overrides = None, processes: Processes = 1) -> None:
    """Filter, tokenize and shuffle the corpora of a configuration into shards; `train` does it by itself if need be.

    Start it as often as you like, on any machines that see the same disk: all share the work. Started again after a
    stop, it continues with the unfinished part.
    """
    config, _ = read_run(run, overrides)
    stop = StopRequest()
    stop.listen()
    folder, manifest = prepare_with_progress(config, stop, processes)
    from dist_transformer.data.prepare.report import REPORT_TEXT_NAME
    from dist_transformer.data.prepare.scan import at_commits
    from dist_transformer.data.recipe import former_rules_warning
    from dist_transformer.data.sources.cached_text import kept_pairs, texts_to_keep

    for corpus, most in texts_to_keep(at_commits(config, manifest.commits)).values():
        kept_pairs(corpus, config.data, most, folder)
    with suppress(FileNotFoundError):
        print((folder / REPORT_TEXT_NAME).read_text(encoding="utf-8"))
    if warning := former_rules_warning(folder, manifest.recipe):
        print(warning)
    print(f"prepared corpus: {folder}  (digest {manifest.digest[:12]})")
