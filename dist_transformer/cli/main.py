"""The command `dist-transformer`. An error that the user can fix is one message and exit code 2, no traceback."""

import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from dist_transformer import __version__
from dist_transformer.cli.end import run_as_command

SPINS_OF_WAITING_THREADS = "10000"
"""Number of times that an idle thread of GNU OpenMP looks for work before it sleeps. Its default takes milliseconds, in which
other processes of a busy machine cannot run; this is as fast on a quiet machine and twice as fast on a busy one
(benchmarks/start.py)."""

VERBS = {
    "Train": {
        "init": "init.init_command",
        "train": "train.train_command",
        "plan": "plan.plan_command",
        "simulate": "plan.simulate_command",
        "demo": "demo.demo_command",
    },
    "Cluster": {
        "submit": "submit.submit_command",
        "pipeline": "pipeline.app",
        "preflight": "preflight.preflight_command",
        "stop": "jobs.stop_command",
        "cancel": "jobs.cancel_command",
        "resume": "jobs.resume_command",
    },
    "Model": {
        "average": "average.average_command",
        "extend-vocabulary": "extend_vocabulary.extend_vocabulary_command",
        "export": "export.export_command",
        "import": "import_model.import_command",
        "translate": "translate.translate_command",
        "rerank": "rerank.rerank_command",
        "score": "score.score_command",
        "evaluate": "evaluate.evaluate_command",
    },
    "Data": {"prepare": "prepare.prepare_command", "data": "data_verbs.app", "demo-corpus": "demo.demo_corpus_command"},
    "Look": {
        "status": "status.status_command",
        "list": "status.list_command",
        "logs": "logs.logs_command",
        "stacks": "logs.stacks_command",
        "verify": "verify.verify_command",
        "report": "report.report_command",
        "compare": "report.compare_command",
        "config": "config_verbs.app",
        "track": "tracking_verbs.app",
        "ui": "tracking_verbs.ui_command",
    },
}
"""In groups, each verb with where in this folder it is."""


def first_sentence(place: str) -> str:
    """The first sentence of a verb's help, read from its file: to import all verbs would take seconds."""
    module, name = place.split(".")
    text = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    found = re.search(
        r'Typer\(help="(.*?)"' if name == "app" else rf'def {name}\(.*?"""(.*?)(?:"""|\n)', text, re.DOTALL
    )
    assert found is not None, place
    return found[1].partition(". ")[0].removesuffix(".") + "."


class Commands(Mapping[str, Any]):
    """The command of each verb; its module is imported when it is asked for, for the others would take longer than it."""

    def __init__(self) -> None:
        self._places = {verb: place for verbs in VERBS.values() for verb, place in verbs.items()}

    def __getitem__(self, verb: str) -> Any:
        module, name = self._places[verb].split(".")
        found = getattr(import_module(f"dist_transformer.cli.{module}"), name)
        holder = typer.Typer(add_completion=False)
        holder.callback()(lambda: None)  # makes it a group
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=verb)
        else:
            holder.command(verb)(found)
        return typer.main.get_group(holder).commands[verb]

    def get(self, verb: str, default: Any = None) -> Any:
        """A verb that is not there is `default`; an error of its module is an error, a KeyError too."""
        return self[verb] if verb in self._places else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Verbs(TyperGroup):
    """Lists the commands in groups, as plain text; rich's panels would take a third of the time of `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "rich_markup_mode": None})
        self.commands = Commands()  # type: ignore[assignment]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, verbs in VERBS.items():
            with formatter.section(group):
                formatter.write_dl([(verb, first_sentence(place)) for verb, place in verbs.items()])


app = typer.Typer(
    name="dist-transformer",
    cls=Verbs,
    help="Trains the encoder-decoder Transformer on Slurm clusters: one YAML file, one command, exact resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


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
    # Of a checkout the current folder is where children find it.
    if not os.path.samefile(".", Path(__file__).parents[2]):
        os.environ["PYTHONSAFEPATH"] = "1"  # they import no modules of the current folder, which may be somebody else's
    run_as_command(app)
