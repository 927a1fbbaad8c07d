"""The command `dist-transformer`. An error that the user can fix is one message and exit code 2, no traceback."""

import os
from typing import Any

import typer
from typer.core import TyperGroup

from dist_transformer import __version__
from dist_transformer.cli import (
    average,
    config_verbs,
    data_verbs,
    demo,
    evaluate,
    export,
    extend_vocabulary,
    import_model,
    jobs,
    logs,
    plan,
    preflight,
    prepare,
    report,
    score,
    simulate,
    status,
    submit,
    sweep,
    track_end,
    tracking_verbs,
    train,
    translate,
)
from dist_transformer.cli.end import run_as_command

SPINS_OF_WAITING_THREADS = "10000"
"""Number of times that an idle thread of GNU OpenMP looks for work before it sleeps. Its default takes milliseconds, in which
other processes of a busy machine cannot run; this is as fast on a quiet machine and twice as fast on a busy one
(benchmarks/start.py)."""

TRAIN, CLUSTER, MODEL, DATA, LOOK = "Train", "Cluster", "Model", "Data", "Look"


class Verbs(TyperGroup):
    """Lists the commands in groups, as plain text; rich's panels would take a third of the time of `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "rich_markup_mode": None})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel in (TRAIN, CLUSTER, MODEL, DATA, LOOK):
            named = {name: command for name, command in self.commands.items() if _panel(command) == panel}
            with formatter.section(panel):
                formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in named.items()])


def _panel(command: object) -> str | None:
    return None if getattr(command, "hidden", False) else getattr(command, "rich_help_panel", None)


app = typer.Typer(
    name="dist-transformer",
    cls=Verbs,
    help="Trains the encoder-decoder Transformer on Slurm clusters: one YAML file, one command, exact resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
tracking_verbs.app.command("end")(track_end.end_command)
app.command("train", rich_help_panel=TRAIN)(train.train_command)
app.command("plan", rich_help_panel=TRAIN)(plan.plan_command)
app.command("simulate", rich_help_panel=TRAIN)(simulate.simulate_command)
app.command("demo", rich_help_panel=TRAIN)(demo.demo_command)
app.command("submit", rich_help_panel=CLUSTER)(submit.submit_command)
app.add_typer(sweep.app, name="sweep", rich_help_panel=CLUSTER)
app.command("preflight", rich_help_panel=CLUSTER)(preflight.preflight_command)
app.command("stop", rich_help_panel=CLUSTER)(jobs.stop_command)
app.command("cancel", rich_help_panel=CLUSTER)(jobs.cancel_command)
app.command("resume", rich_help_panel=CLUSTER)(jobs.resume_command)
app.command("average", rich_help_panel=MODEL)(average.average_command)
app.command("extend-vocabulary", rich_help_panel=MODEL)(extend_vocabulary.extend_vocabulary_command)
app.command("export", rich_help_panel=MODEL)(export.export_command)
app.command("import", rich_help_panel=MODEL)(import_model.import_command)
app.command("translate", rich_help_panel=MODEL)(translate.translate_command)
app.command("score", rich_help_panel=MODEL)(score.score_command)
app.command("evaluate", rich_help_panel=MODEL)(evaluate.evaluate_command)
app.command("prepare", rich_help_panel=DATA)(prepare.prepare_command)
app.add_typer(data_verbs.app, name="data", rich_help_panel=DATA)
app.command("demo-corpus", rich_help_panel=DATA)(demo.demo_corpus_command)
app.command("status", rich_help_panel=LOOK)(status.status_command)
app.command("list", rich_help_panel=LOOK)(status.list_command)
app.command("logs", rich_help_panel=LOOK)(logs.logs_command)
app.command("stacks", rich_help_panel=LOOK)(logs.stacks_command)
app.command("report", rich_help_panel=LOOK)(report.report_command)
app.command("compare", rich_help_panel=LOOK)(report.compare_command)
app.add_typer(config_verbs.app, name="config", rich_help_panel=LOOK)
app.add_typer(tracking_verbs.app, name="track", rich_help_panel=LOOK)
app.command("ui", rich_help_panel=LOOK)(tracking_verbs.ui_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Trains the encoder-decoder Transformer on Slurm clusters: one YAML file, one command, exact resume."""


def main() -> None:
    """The command `dist-transformer`."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS_OF_WAITING_THREADS)  # OpenMP reads it when torch is imported
    run_as_command(app)
