"""The command `dist-transformer`. An error that the user can fix is one message and exit code 2, no traceback."""

import os
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
        "train": (
            "train.train_command",
            "Train, or resume a run folder from its newest complete checkpoint, on any number of ranks.",
        ),
        "plan": (
            "plan.plan_command",
            "Memory per GPU, step time and hours of a run on each number of nodes, and which settings fit.",
        ),
        "simulate": (
            "simulate.simulate_command",
            "Share of its node-hours that a run keeps on each number of nodes despite failures, and how often to save.",
        ),
        "demo": (
            "demo.demo_command",
            "Train on the embedded corpus, stop and resume on the way, score on held-out pairs, translate three sentences.",
        ),
    },
    "Cluster": {
        "submit": (
            "submit.submit_command",
            "Check a run and submit it as a Slurm job that saves, requeues and resumes by itself.",
        ),
        "sweep": ("sweep.app", "Many runs that differ in some settings; `submit --sweep` starts them."),
        "preflight": (
            "preflight.preflight_command",
            "Measure this machine: matmul, disk, memory, and between ranks the network.",
        ),
        "stop": ("jobs.stop_command", "Ask a run to save and end at its next step."),
        "cancel": (
            "jobs.cancel_command",
            "End a run's job now and for good, without waiting for a checkpoint (`stop` saves first).",
        ),
        "resume": ("jobs.resume_command", "Submit a run again, from its newest checkpoint."),
    },
    "Model": {
        "average": (
            "average.average_command",
            "Make a model folder of a run's checkpoints; without an option: as set by checkpoints.final_model.",
        ),
        "extend-vocabulary": (
            "extend_vocabulary.extend_vocabulary_command",
            "Add pieces to the vocabulary of a trained model, each with the mean of the rows of the pieces it was cut into.",
        ),
        "export": (
            "export.export_command",
            "Write a model folder in the format of another program, tokenizer included.",
        ),
        "import": (
            "import_model.import_command",
            "Make a model folder of a model of another program, with the same logits and token ids.",
        ),
        "translate": (
            "translate.translate_command",
            "Translate standard input to standard output, or a file to a file, a line each, in order; empty lines stay empty.",
        ),
        "score": (
            "score.score_command",
            "Print the log-probability (natural) of given translations, a line each, and the perplexity of all on stderr.",
        ),
        "evaluate": (
            "evaluate.evaluate_command",
            "Score a model: sacreBLEU and chrF with their signatures, and the share of exact matches.",
        ),
    },
    "Data": {
        "prepare": (
            "prepare.prepare_command",
            "Filter, tokenize and shuffle the corpora of a configuration into shards; `train` does it by itself if need be.",
        ),
        "data": ("data_verbs.app", "Look at the data of a run, and check how it was used."),
        "demo-corpus": ("demo.demo_corpus_command", "Write the embedded English-German corpus as aligned text files."),
    },
    "Look": {
        "status": (
            "status.status_command",
            "Show the state of a run and its job: why it waits, how far it is, what ended it last.",
        ),
        "list": ("status.list_command", "List the runs of a folder, the one that wrote last first."),
        "logs": (
            "logs.logs_command",
            "Print the log of a run's newest job, or train.log if there was none; for a job id, the log of that job.",
        ),
        "stacks": (
            "logs.stacks_command",
            "Print the stacks of each rank of a running run: all threads, also while they wait in a collective.",
        ),
        "report": (
            "report.report_command",
            "Write a page about a run: its history, data, scores, samples and pictures, in one file that needs no network.",
        ),
        "compare": (
            "report.compare_command",
            "Compare runs: settings that differ, scores, curves and translations side by side.",
        ),
        "config": ("config_verbs.app", "Check, show or describe a configuration."),
        "track": ("tracking_verbs.app", "Bring runs and MLflow together."),
        "ui": ("tracking_verbs.ui_command", "Open MLflow's web page on the runs of a folder."),
    },
}
"""In groups, each verb with where in this folder it is, and the first line of its help."""


class Commands(Mapping[str, Any]):
    """The command of each verb; its module is imported when it is asked for, for the others would take longer than it."""

    def __init__(self) -> None:
        self._places = {verb: place for verbs in VERBS.values() for verb, (place, _) in verbs.items()}

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
                formatter.write_dl([(verb, text) for verb, (_, text) in verbs.items()])


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
    if not os.path.samefile(
        ".", Path(__file__).parents[2]
    ):  # of a checkout the current folder is where children find it
        os.environ["PYTHONSAFEPATH"] = "1"  # they import no modules of the current folder, which may be somebody else's
    run_as_command(app)
