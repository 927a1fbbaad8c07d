"""config check | show | schema: look at a configuration without starting anything."""

import json
from pathlib import Path

import typer

from dist_transformer.cli.arguments import ConfigArgument, Overrides
from dist_transformer.cluster.checks import memory_problems, start_problems
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.config.credentials import tracking_address
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.config.schema import Config
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import ConfigError
from dist_transformer.planning.vocabularies import count_parameters, with_counted_pieces
from dist_transformer.run.folder import RunDir

app = typer.Typer(help="Check, show or describe a configuration.", no_args_is_help=True)


@app.command("check")
def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Report every problem of a configuration at once; exit code 2 if there is one."""
    checked = fill_from_profile(load_config(config, overrides))
    run_dir = RunDir(Path(checked.run.root) / checked.run.name)
    if problems := [*memory_problems(checked), *start_problems(checked, run_dir), *first_pairs_problems(checked)]:
        raise ConfigError(problems)
    if checked.tracking.enabled:
        tracking_address(checked.tracking)  # raises if the variable holds no address
    parameters = count_parameters(with_counted_pieces(checked))
    num_ranks = checked.slurm.nodes * checked.slurm.ranks_per_node
    job = f", ranks in a Slurm job: {num_ranks}" if "slurm" in checked.model_fields_set else ""
    print(
        f"{config}: no problem found. Run {checked.run.root}/{checked.run.name}: {parameters:,} parameters, "
        f"{checked.data.lanes} lanes of {checked.data.max_tokens} tokens a step{job}."
    )


@app.command("show")
def show(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Print the resolved configuration: defaults, presets, `extends` and overrides filled in."""
    print(to_yaml(load_config(config, overrides, check_files=False)), end="")


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of the configuration, for editors."""
    print(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False))
