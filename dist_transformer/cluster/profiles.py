"""Cluster profiles: settings that differ between sites, in `slurm/clusters/*.yaml` or a file of your own.

A profile holds keys of the `slurm:` section and fills only those that the run's YAML does not give.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_transformer.config.credentials import secret_problems
from dist_transformer.config.former_keys import take_former_keys
from dist_transformer.config.loading import suggestion, value_problem
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import SlurmConfig
from dist_transformer.config.yaml_positions import Marked, dotted, read_yaml
from dist_transformer.errors import ConfigError
from dist_transformer.package_data import share_folder


def load_profile(name_or_path: str) -> dict[str, Any]:
    """The keys of a profile: a name in slurm/clusters/, or the path of a YAML file. Raises ConfigError: all problems of
    the file, each with its line."""
    found = read_yaml(_find(name_or_path))
    as_section = Marked({"slurm": found.values}, {("slurm", *path): place for path, place in found.where.items()})
    marked, problems = take_former_keys(as_section)
    values: dict[str, Any] = marked.values["slurm"]
    known = [key for key in SlurmConfig.model_fields if key != "cluster"]
    for key in (key for key in values if key not in known):
        hint = suggestion(key, known)
        problems.append(f"{marked.place(('slurm', key))}: {key}: no such key in a cluster profile{hint}")
    try:
        checked = SlurmConfig.model_validate({key: values[key] for key in values if key in SlurmConfig.model_fields})
        problems += [f"{marked.place(path)}: {message}" for path, message in secret_problems({"slurm": checked})]
    except ValidationError as error:
        for wrong in error.errors():
            path = ("slurm", *wrong["loc"])
            problems.append(f"{marked.place(path)}: {dotted(wrong['loc'])}: {value_problem(path, wrong)}")
    if problems:
        raise ConfigError(problems)
    return values


def fill_from_profile(config: Config) -> Config:
    """`config` with its profile's values where it gives none itself; `environment`, `sbatch` and `srun` are merged name by name.

    Needs the configuration as it was first read: one that was written out and read again gives every key.
    """
    if config.slurm.cluster is None:
        return config
    profile = load_profile(config.slurm.cluster)
    given = config.slurm.model_dump(include=config.slurm.model_fields_set)
    merged = {key: {**profile.get(key, {}), **given.get(key, {})} for key in ("environment", "sbatch", "srun")}
    return config.model_copy(update={"slurm": SlurmConfig.model_validate({**profile, **given, **merged})})


def _find(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    folder = share_folder("slurm") / "clusters"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name_or_path in known:
        return folder / f"{name_or_path}.yaml"
    problem = f"no profile {name_or_path!r} in {folder}, and a file of your own is given by its path"
    raise ConfigError([f"slurm.cluster: {problem}{suggestion(name_or_path, known)}"])
