"""Arguments common to several verbs: configurations, run folders, and options of the search for translations."""

import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from dist_transformer.config.loading import load_config, suggestion, value_problem
from dist_transformer.config.model_size import with_precision
from dist_transformer.config.schema import BeamConfig, Config, DecodingConfig
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.run.folder import RunDir

ConfigArgument = Annotated[Path, typer.Argument(help="A YAML file.", show_default=False)]
RunArgument = Annotated[Path, typer.Argument(help="A YAML file, or a run folder to resume.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over those of the file: optimizer.learning_rate=3e-4", show_default=False),
]
RunOrJob = Annotated[str, typer.Argument(help="A run folder, or a job id: 123, 123_4.", show_default=False)]
Root = Annotated[Path, typer.Option(help="The folder of runs, looked through for a job that Slurm has forgotten.")]
RUNS = Path("runs")


def read_run(run: Path, overrides: list[str] | None = None, *, check_files: bool = True) -> tuple[Config, RunDir]:
    """Configuration and run folder of a YAML file, or of a run folder to be resumed.

    `check_files`: check that the text files named in a YAML file exist; those of a run folder may have been removed.
    """
    if run.is_dir():
        run_dir = RunDir(run)
        if not run_dir.config.is_file():
            raise UserError(f"{run}: is a folder without config.yaml, so not a run folder; give one, or a YAML file")
        if renaming := [o for o in overrides or [] if o.startswith(("run.name=", "run.root="))]:
            raise UserError(f"{run} is a run folder and keeps its name: give the YAML file together with {renaming[0]}")
        if any(override.startswith("slurm.cluster=") for override in overrides or []):
            raise UserError(
                "slurm.cluster: the settings of a run folder are complete, so a profile fills none of them; give the YAML "
                "file, or the settings themselves: slurm.sbatch.partition=..."
            )
        config = load_config(run_dir.config, overrides, check_files=False)
        if (given := config.data.prepared) is not None:
            data = config.data.model_copy(update={"prepared": str(run_dir.prepared(given))})
            config = config.model_copy(update={"data": data})
        return config, run_dir
    config = load_config(run, overrides, check_files=check_files)
    run_dir = RunDir(Path(config.run.root) / config.run.name)
    if config.training.precision == "auto" and run_dir.config.is_file():  # a run resumes in its original precision
        config = with_precision(config, load_config(run_dir.config, check_files=False).training.precision)
    return config, run_dir


def read_run_folder(run: Path, overrides: list[str] | None = None) -> tuple[Config, RunDir]:
    """As `read_run`, of a run folder only."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; expected a run folder (<run.root>/<run.name>)")
    return read_run(run, overrides, check_files=False)


def check_ranks(config: Config, num_ranks: int) -> None:
    """Raises UserError if it is no number of ranks, or above that of the lanes."""
    if type(num_ranks) is not int or num_ranks < 1:
        raise UserError(f"ranks: expected a whole number from 1 on, got {num_ranks!r}")
    if num_ranks > config.data.lanes:
        raise ConfigError([f"{num_ranks} ranks, but data.lanes is {config.data.lanes}: each needs one; use fewer"])


def write_utf8() -> None:
    """Sets standard output to UTF-8, like text files, whatever the terminal's language."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


PANEL = "Search (default: as the run's configuration says)"
ModelArgument = Annotated[Path, typer.Argument(help="A model folder, or a run folder.", show_default=False)]
EnsembleOption = Annotated[
    list[Path] | None,
    typer.Option(help="A further model of the same vocabulary; several are one by their mean probabilities."),
]
PluginOption = Annotated[
    str | None,
    typer.Option(
        help="The code of a model with model.plugin, which is executed: FILE.py:NAME, MODULE:NAME or an entry point.",
        show_default=False,
    ),
]


def option_of_search(text: str, *flags: str, **limits: Any) -> Any:
    """An option in the panel of the search; `limits`: `min`, `max`."""
    return typer.Option(*flags, help=text, rich_help_panel=PANEL, **limits)


BeamOption = Annotated[int | None, option_of_search("Beam size (6.1: 4).", min=1)]
PenaltyOption = Annotated[float | None, option_of_search("Length penalty alpha (6.1: 0.6).", min=0.0, max=10.0)]
TooLongOption = Annotated[Literal["refuse", "split"] | None, option_of_search("Lines above --max-source-tokens.")]
MaxSourceOption = Annotated[int | None, option_of_search("Longest line, in tokens, translated at once.", min=2)]


def search_settings(model: Path, **given: Any) -> DecodingConfig:
    """Settings of the run of `model`, if it is a run folder, overridden by `given` values that are not None. Raises
    ConfigError: settings are invalid, or exclude each other."""
    base = read_run(model)[0].decoding if (model / "config.yaml").is_file() else BeamConfig()
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        settings = DecodingConfig(**{**base.model_dump(), **changes})
        problems = list(_problems(settings))
    except ValidationError as error:
        problems = [_explained(str(problem["loc"][0]), problem) for problem in error.errors()]
    if problems:
        raise ConfigError(problems, "the search cannot be done as it is asked for:")
    return settings


def noting_tags(model: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines, and warns at their end if none begins with a tag, as each training sentence of a run `model` did."""
    corpora = read_run(model)[0].data.training_corpora() if (model / "config.yaml").is_file() else {}
    first = tuple(sorted({tag for corpus in corpora.values() for tag in corpus.tags[:1]}))
    is_bare = bool(corpora) and all(corpus.tags for corpus in corpora.values())
    for line in lines:
        is_bare = is_bare and not line.startswith(first)
        yield line
    if is_bare:
        print(f"warning: no line begins with {' or '.join(first)}, as every training sentence did", file=sys.stderr)


def _explained(name: str, problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting{suggestion(name, DecodingConfig.model_fields)}"
    return f"{name}: {value_problem((name,), problem)}"


def _problems(settings: DecodingConfig) -> Iterator[str]:
    if settings.sampling:
        return
    if settings.n_best > settings.beam_size:
        yield (
            f"n_best: {settings.n_best} is above the beam, {settings.beam_size}: a search gives at most as many translations "
            "as its beam, also to --mbr; raise it (--beam), or draw them (--sampling)"
        )
    for name in ("temperature", "top_k", "top_p"):
        if getattr(settings, name) != DecodingConfig.model_fields[name].default:
            yield f"{name}: is of sampling, which is off; switch it on (--sampling), or leave it out"
