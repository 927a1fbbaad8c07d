"""prepare: makes a prepared corpus of text, once, by one process or many. data inspect | audit | clean: look at the training
data, prove that every row was used as planned, write clean text."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import ConfigArgument, Overrides, RunArgument, write_utf8
from dist_transformer.config.loading import load_config
from dist_transformer.errors import UserError
from dist_transformer.format import progress_bar
from dist_transformer.processes.stop_request import StopRequest
from dist_transformer.run.read_run import read_run

app = typer.Typer(help="Look at the data of a run, check how it was used, or clean its text.", no_args_is_help=True)

Step = Annotated[
    int | None,
    typer.Option(
        help="Number of the global batch, from 1; batches whose fp16 update is skipped count too. Default: the next one: "
        "the first of a YAML file, or the one after the newest checkpoint of a run folder."
    ),
]
NumRows = Annotated[int, typer.Option("--rows", min=0, help="Rows to print as text and pieces.")]
Lane = Annotated[int | None, typer.Option(min=0, help="Lane of these rows; default: the first that has some.")]
Processes = Annotated[
    int, typer.Option(min=1, help="Processes on this machine that share the work; as many as it has cores is fastest.")
]


def prepare_command(run: RunArgument, overrides: Overrides = None, processes: Processes = 1) -> None:
    """Filter, tokenize and shuffle the corpora of a configuration into shards; `train` does it by itself if need be.

    Start it as often as you like, on any machines that see the same disk: all share the work. Started again after a
    stop, it continues with the unfinished part.
    """
    from dist_transformer.data.prepare.progress import prepare_with_progress

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


@app.command("inspect")
def inspect_command(
    run: RunArgument, overrides: Overrides = None, step: Step = None, rows: NumRows = 3, lane: Lane = None
) -> None:
    """Print the global batch of a step: sizes, padding and corpora by lane, its digest, and rows as text and pieces.

    A run folder is read from its newest checkpoint before the step, a YAML file from the first step on. Prepares the
    corpus first if it is not prepared yet. The digest is the one in metrics.jsonl, on any number of ranks.
    """
    from dist_transformer.data.prepare.progress import prepare_with_progress
    from dist_transformer.data.prepare.scan import load_tokenizer
    from dist_transformer.training.inspect_batch import batch_of_step, print_batch, print_rows
    from dist_transformer.training.run_data import open_run_data

    config, run_dir = read_run(run, overrides)
    if lane is not None and lane >= config.data.lanes:
        raise UserError(f"--lane {lane}: data.lanes is {config.data.lanes}, so lanes are 0 to {config.data.lanes - 1}")
    folder, manifest = prepare_with_progress(config)
    seen = batch_of_step(open_run_data(config, folder, manifest), run_dir if run.is_dir() else None, step)
    write_utf8()
    print_batch(seen, manifest)
    print_rows(seen, manifest, load_tokenizer(folder, manifest.tokenizer), lane, rows)


@app.command("audit")
def audit_command(run: RunArgument) -> None:
    """Prove from the row ids of a run with data.audit=true that no row was lost or repeated; exit code 2 if one was.

    Batches up to the newest checkpoint are checked: every row must have been used as often as planned, through stops,
    mixtures and cuts, except for rows that filters drop on the fly or that are quarantined.
    """
    from dist_transformer.training.audit_run import audit_run

    config, run_dir = read_run(run, check_files=False)
    audit_run(config, run_dir)


@app.command("clean")
def clean_command(
    file: ConfigArgument,
    out: Annotated[Path, typer.Argument(help="Folder of the text files.")],
    overrides: Overrides = None,
) -> None:
    """Write the pairs of the training corpora that data.filters keeps, and those that it drops with the rule.

    OUT gets NAME.LANGUAGE for each corpus and side, NAME.dropped.tsv (rule, number, source, target) and clean.json with
    counts. Rules that need tokens (data.filters.max_tokens, max_length_ratio) are left to `prepare`.
    """
    from dist_transformer.data.prepare.clean import clean

    config = load_config(file, overrides)
    with progress_bar() as draw:
        report = clean(config, out, draw)
    for name, counts in report["corpora"].items():
        dropped = ", ".join(f"{rule} {count:,}" for rule, count in counts["dropped"].items()) or "none"
        print(f"{name}: kept {counts['kept']:,} of {counts['pairs']:,} pairs; dropped: {dropped}")
    print(f"written: {out}")
