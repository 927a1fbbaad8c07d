"""The command `dist-transformer`. An error that the user can fix is one message and an exit code, never a traceback."""

import errno
import io
import os
import re
import sys
from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from dist_transformer import __version__
from dist_transformer.errors import EXIT_FAILED, DistTransformerError, UserError, say
from dist_transformer.processes.stop_request import leave
from dist_transformer.run.outputs import as_message

SPINS_OF_WAITING_THREADS = "10000"
"""Number of times that an idle thread of GNU OpenMP looks for work before it sleeps. Its default takes milliseconds, in which
other processes of a busy machine cannot run; this is as fast on a quiet machine and twice as fast on a busy one
(benchmarks/start.py)."""

VERBS = {
    "Train": ("init", "train", "plan", "simulate", "demo"),
    "Cluster": ("submit", "pipeline", "preflight", "stop", "cancel", "resume"),
    "Model": ("average", "extend-vocabulary", "export", "import", "translate", "rerank", "score", "evaluate"),
    "Data": ("prepare", "data", "demo-corpus"),
    "Look": ("status", "list", "logs", "stacks", "verify", "report", "compare", "config", "track", "ui"),
}
"""The verbs in groups. Each is VERB_command in VERB.py of this folder, but for those below."""
FILES = {"simulate": "plan", "stop": "submit", "cancel": "submit", "resume": "submit", "list": "status", "stacks": "logs",
         "compare": "report", "rerank": "score", "demo-corpus": "demo", "ui": "tracking_verbs", "prepare": "data_verbs",
         **dict.fromkeys(("average", "export", "extend-vocabulary", "import", "verify"), "model_verbs")}  # fmt: skip
APPS = {"pipeline": "pipeline", "data": "data_verbs", "config": "config_verbs", "track": "tracking_verbs"}
"""Verbs that have verbs of their own: `app` in these files."""


def place_of(verb: str) -> tuple[str, str]:
    """The file of a verb in this folder, and its name there."""
    name = verb.replace("-", "_")
    return (APPS[verb], "app") if verb in APPS else (FILES.get(verb, name), f"{name}_command")


def first_sentence(verb: str) -> str:
    """The first sentence of a verb's help, read from its file: to import all verbs would take seconds."""
    module, name = place_of(verb)
    text = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    pattern = r'Typer\(help="(.*?)"' if name == "app" else rf'def {name}\(.*?"""(.*?)(?:"""|\n)'
    found = re.search(pattern, text, re.DOTALL)
    assert found is not None, verb
    return found[1].partition(". ")[0].removesuffix(".") + "."


class Commands(UserDict[str, Any]):
    """The command of each verb; its module is imported when it is asked for, for the others would take longer than it."""

    def __init__(self) -> None:
        super().__init__({verb: place_of(verb) for verbs in VERBS.values() for verb in verbs})

    def __getitem__(self, verb: str) -> Any:
        module, name = self.data[verb]
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
        return self[verb] if verb in self.data else default


MAY_BE_EMPTY = ("--after", "--node")
"""Options that name jobs, or a node of a pipeline: none if they are empty."""


class Verbs(TyperGroup):
    """Lists the commands in groups, as plain text; rich's panels would take a third of the time of `--help`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "rich_markup_mode": None})
        self.commands = Commands()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuses empty arguments, as of a shell's variable that is not set: a path of them would be the current folder."""
        for before, argument in pairwise(args):
            option = argument.removesuffix("=") if re.fullmatch(r"--[\w-]+=", argument) else before
            if (not argument or option != before) and option not in MAY_BE_EMPTY:
                place = option if argument else f"the argument after {option}"
                raise UserError(f"{place}: is empty, as of a variable that is not set; give a value, or leave it out")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, verbs in VERBS.items():
            with formatter.section(group):
                formatter.write_dl([(verb, first_sentence(verb)) for verb in verbs])


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
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed, as by `2>&-`: the next file that is opened would take its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # which dup2 does not where it is that number already
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS_OF_WAITING_THREADS)  # OpenMP reads it when torch is imported
    is_checkout = False  # then the current folder is where children find it
    with suppress(OSError):  # a current folder that this user may not enter (sudo -u)
        is_checkout = os.path.samefile(".", Path(__file__).parents[2])
    if not is_checkout:
        os.environ["PYTHONSAFEPATH"] = "1"  # they import no modules of the current folder, which may be somebody else's
    run_as_command(app)


def run_as_command(run: Callable[[], object]) -> None:
    """Runs a command, or a part of it in a new process; ends the process with an exit code of errors.py."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may be invalid text
    try:
        run()
    except DistTransformerError as error:
        if not error.is_agreed or os.environ.get("RANK", "0") == "0":
            say(f"dist-transformer: {error}")
        _leave(error.exit_code)
    except OSError as error:
        _drop_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(EXIT_FAILED)  # the reader has ended: `| head`
        if isinstance(error, FileNotFoundError) and error.filename is None:
            error.filename = "the current folder"  # was removed: os.getcwd() names none
        if error.filename is None and error.errno in (None, errno.EBADF, errno.EINVAL):
            raise
        message = as_message(error)
        say(f"dist-transformer: {message}")
        _leave(message.exit_code)
    except RuntimeError as error:
        from dist_transformer.distributed.causes import exit_code_of, explain, is_of_another
        from dist_transformer.training.memory import is_out_of_memory

        cause = explain(error)
        if is_of_another(cause) and "RANK" not in os.environ:
            cause = None  # no ranks: it is a connection of another library
        if cause is None and not is_out_of_memory(error):
            raise
        ways = "lower decoding.max_tokens (translate --max-tokens) or the beam; CUDA_VISIBLE_DEVICES= takes the CPU"
        say(f"dist-transformer: {cause or f'out of memory ({str(error).splitlines()[0]}): {ways}'}")
        _leave(exit_code_of(cause))


def _drop_output() -> None:
    """Discards buffered output that cannot be written; the end of the process would try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(code: int) -> None:
    """Ends the process; a rank at once, because destroying its group could wait for ranks that wait for it."""
    if "RANK" in os.environ:
        leave(code)
    sys.exit(code)
