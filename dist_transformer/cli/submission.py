"""What submit shows of a submission before it is made: its size, its memory, its commands."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from dist_transformer.config.schema import Config
from dist_transformer.planning.vocabularies import count_parameters
from dist_transformer.planning.vocabulary_sizes import with_counted_pieces


def num_parameters_of(config: Config) -> int:
    return count_parameters(with_counted_pieces(config))


def memory_problems(config: Config) -> list[str]:
    """What does not fit the GPUs of the partition, where slurm.gpu_memory_gb says how large they are."""
    slurm = config.slurm
    if slurm.gpu_memory_gb is None or not slurm.gpus_per_node:
        return []
    from dist_transformer.planning.memory import memory_problem

    problem = memory_problem(with_counted_pieces(config), slurm.nodes * slurm.ranks_per_node, slurm.gpu_memory_gb)
    return [] if problem is None else [f"slurm.gpu_memory_gb: {problem}"]


def show_plan(commands: Sequence[str], files: dict[Path, str]) -> None:
    """What --dry-run prints: every command and every file."""
    for command in commands:
        print(f"# command (the files below must be written first)\n{command}\n")
    for path, text in files.items():
        print(f"# {path}\n{text}")


def show_commands(folder: Path, verbs: Sequence[tuple[str, str]]) -> None:
    """Commands to type: what for, and the command with FOLDER in the place of the folder."""
    quoted = shlex.quote(str(folder))
    for purpose, command in verbs:
        print(f"{purpose:8}{command.replace('FOLDER', quoted)}")
