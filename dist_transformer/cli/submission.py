"""Information that submit prints before a submission: size, memory, commands."""

from collections.abc import Sequence
from pathlib import Path

from dist_transformer.config.schema import Config
from dist_transformer.planning.vocabularies import count_parameters, with_counted_pieces


def num_parameters_of(config: Config) -> int:
    return count_parameters(with_counted_pieces(config))


def memory_problems(config: Config) -> list[str]:
    """Problem of a run that does not fit the GPUs of the partition, if slurm.gpu_memory_gb gives their size."""
    slurm = config.slurm
    if slurm.gpu_memory_gb is None or not slurm.gpus_per_node:
        return []
    from dist_transformer.planning.memory import memory_problem

    problem = memory_problem(with_counted_pieces(config), slurm.nodes * slurm.ranks_per_node, slurm.gpu_memory_gb)
    return [] if problem is None else [f"slurm.gpu_memory_gb: {problem}"]


def show_plan(commands: Sequence[str], files: dict[Path, str]) -> None:
    """Prints every command and every file, for --dry-run."""
    for command in commands:
        print(f"# command (the files below must be written first)\n{command}\n")
    for path, text in files.items():
        print(f"# {path}\n{text}")
