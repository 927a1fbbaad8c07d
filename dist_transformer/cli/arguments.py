"""Arguments common to several verbs: configurations, run folders, and options of the search for translations."""

import io
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

ConfigArgument = Annotated[Path, typer.Argument(help="A YAML file.")]
RunArgument = Annotated[Path, typer.Argument(help="A YAML file, or a run folder to resume.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings over those of the file: optimizer.learning_rate=3e-4")
]
RunOrJob = Annotated[str, typer.Argument(help="A run folder, or a job id: 123, 123_4.")]
Root = Annotated[Path, typer.Option(help="The folder of runs, looked through for a job that Slurm has forgotten.")]
RUNS = Path("runs")


def write_utf8() -> None:
    """Sets standard output to UTF-8, like text files, whatever the terminal's language."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


PANEL = "Search (default: as the run's configuration says)"
ModelArgument = Annotated[Path, typer.Argument(help="A model folder, or a run folder.")]
EnsembleOption = Annotated[
    list[Path] | None,
    typer.Option(help="A further model of the same vocabulary; several are one by their mean probabilities."),
]
PluginOption = Annotated[
    str | None,
    typer.Option(
        help="The code of a model with model.plugin, which is executed: FILE.py:NAME, MODULE:NAME or an entry point."
    ),
]


def option_of_search(text: str, *flags: str, **limits: Any) -> Any:
    """An option in the panel of the search; `limits`: `min`, `max`."""
    return typer.Option(*flags, help=text, rich_help_panel=PANEL, **limits)


BeamOption = Annotated[int | None, option_of_search("Beam size (6.1: 4).", min=1)]
PenaltyOption = Annotated[float | None, option_of_search("Length penalty alpha (6.1: 0.6).", min=0.0, max=10.0)]
TooLongOption = Annotated[Literal["refuse", "split"] | None, option_of_search("Lines above --max-source-tokens.")]
MaxSourceOption = Annotated[int | None, option_of_search("Longest line, in tokens, translated at once.", min=2)]
