"""Settings of the Slurm job. Their defaults are defined here and nowhere else."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dist_transformer.config.section import Int, Number, PositiveInt, Section, Str
from dist_transformer.config.yaml12 import as_written

LOST_ATTEMPTS = 4
"""Factor of max_restarts_without_progress for attempts that end without a record (node failures, pre-emption)."""

CPU_BIND = "cores"
"""Default of srun --cpu-bind: each rank is bound to cores of its own."""


def _option(value: Any) -> Any:
    texts = tuple(map(as_written, value)) if isinstance(value, list | tuple) else as_written(value)
    if value is None or isinstance(value, bool) or all(isinstance(text, str) for text in listed(texts)):
        return texts
    raise PydanticCustomError("option", "expected text, a list of texts, or true for an option without a value")


Options = dict[Str, Annotated[Any, BeforeValidator(_option)]]
"""Long options of a command by their names: a text, several that a comma joins, true for none; null and false: not given."""


def listed(value: Any) -> tuple[Any, ...]:
    """The values of an option one by one."""
    return value if isinstance(value, tuple) else (value,)


def command_options(options: Mapping[str, Any]) -> list[str]:
    """--name=value of each option that is given, one element each."""
    given = {name: value for name, value in options.items() if value not in (None, False, ())}
    return [
        f"--{name}" if value is True else f"--{name}={','.join(map(str, listed(value)))}"
        for name, value in given.items()
    ]


class SlurmConfig(Section):
    """Resources and options with which `submit` requests the job. Settings of sites are in slurm/clusters/*.yaml."""

    cluster: Str | None = Field(
        None, description="Profile: a name in slurm/clusters/ or a path; fills what is not given."
    )
    nodes: PositiveInt = Field(1, description="Nodes of the job.")
    spare_nodes: Int = Field(0, ge=0, description="Further nodes of the job that wait for one of the others to die.")
    ranks_per_node: PositiveInt = Field(1, description="Ranks on each node: one per GPU.")
    gpus_per_node: Int = Field(0, ge=0, description="GPUs asked for on each node; 0: CPU training.")
    gpu_memory_gb: Number | None = Field(
        None, gt=0.0, description="Memory of one GPU of the partition; with it submit refuses what cannot fit."
    )
    cpus_per_rank: PositiveInt = Field(1, description="CPUs of each rank.")
    time_limit: Str = Field("24:00:00", pattern=r"^[0-9:-]+$", description="Time limit as sbatch --time takes it.")
    signal_seconds: PositiveInt = Field(180, description="Seconds before the limit when the job is signalled to save.")
    max_restarts_without_progress: PositiveInt = Field(3, description="Restarts without a checkpoint before giving up.")
    preflight: Literal["off", "report", "exclude"] = Field(
        "off",
        description="Check the nodes before each attempt: only say what is slow, or requeue the job away from bad nodes.",
    )
    container_image: Str | None = Field(None, description="Image that the ranks run in; the batch script does not.")
    container_runtime: Literal["pyxis", "apptainer"] = Field("pyxis", description="What runs the image.")
    container_mounts: tuple[Str, ...] = Field((), description="Folders seen inside: '/scratch', '/data:/corpora'.")
    setup: tuple[Str, ...] = Field((), description="Shell lines run on each job start: module load, activate.")
    environment: dict[str, Str] = Field(default_factory=dict, description="Environment variables of jobs; no secrets.")
    sbatch: Options = Field(
        default_factory=dict,
        description="What else sbatch is asked for, by its long options without dashes: partition, account, qos, constraint, "
        "mem, exclude, gres: 'gpu:h200:8' (in place of --gpus-per-node; needs gpus_per_node too), exclusive: true.",
    )
    srun: Options = Field(
        default_factory=dict,
        description="The same of srun, for the ranks; cpu-bind is cores unless given here, null: as the site does.",
    )


Stage = Literal["prepare", "train", "average", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
