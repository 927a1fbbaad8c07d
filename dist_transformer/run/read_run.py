"""A run as a user names it: by its YAML file, or by its folder."""

from pathlib import Path

from dist_transformer.config.loading import load_config
from dist_transformer.config.model_size import with_precision
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError, UserError
from dist_transformer.run.folder import RunDir


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
