"""The command `dist-transformer`. An error the user can mend is one message and exit code 2, never a traceback."""

import typer

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

app = typer.Typer(
    name="dist-transformer",
    help="Trains the encoder-decoder Transformer on Slurm clusters: one YAML file, one command, exact resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_verbs.app, name="config")
app.add_typer(data_verbs.app, name="data")
app.command("prepare")(prepare.prepare_command)
app.command("train")(train.train_command)
app.command("plan")(plan.plan_command)
app.command("simulate")(simulate.simulate_command)
app.command("submit")(submit.submit_command)
app.add_typer(sweep.app, name="sweep")
app.command("preflight")(preflight.preflight_command)
app.command("status")(status.status_command)
app.command("list")(status.list_command)
app.command("logs")(logs.logs_command)
app.command("stacks")(logs.stacks_command)
app.command("stop")(jobs.stop_command)
app.command("cancel")(jobs.cancel_command)
app.command("resume")(jobs.resume_command)
app.command("average")(average.average_command)
app.command("extend-vocabulary")(extend_vocabulary.extend_vocabulary_command)
app.command("export")(export.export_command)
app.command("import")(import_model.import_command)
app.command("translate")(translate.translate_command)
app.command("score")(score.score_command)
app.command("evaluate")(evaluate.evaluate_command)
app.command("report")(report.report_command)
app.command("compare")(report.compare_command)
app.command("demo")(demo.demo_command)
app.command("demo-corpus")(demo.demo_corpus_command)
tracking_verbs.app.command("end")(track_end.end_command)
app.add_typer(tracking_verbs.app, name="track")
app.command("ui")(tracking_verbs.ui_command)


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
    run_as_command(app)
