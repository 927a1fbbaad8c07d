"""Settings of the Slurm job. Their defaults are defined here and nowhere else."""

from typing import Literal, get_args

from pydantic import Field

from dist_transformer.config.section import Fraction, Int, Number, PositiveInt, Section, Str

LOST_ATTEMPTS = 4
"""Factor of max_restarts_without_progress for attempts that end without a record (node failures, pre-emption)."""


class SlurmConfig(Section):
    """Resources and options with which `submit` requests the job. Settings of sites are in slurm/clusters/*.yaml."""

    cluster: Str | None = Field(
        None, description="Profile: a name in slurm/clusters/ or a path; fills what is not given."
    )
    nodes: PositiveInt = Field(1, description="Nodes of the job.")
    ranks_per_node: PositiveInt = Field(1, description="Ranks on each node: one per GPU.")
    gpus_per_node: Int = Field(0, ge=0, description="GPUs asked for on each node; 0: CPU training.")
    gres: Str | None = Field(
        None,
        description="For sites that want --gres in place of --gpus-per-node: 'gpu:h200:8'; needs gpus_per_node too.",
    )
    gpu_memory_gb: Number | None = Field(
        None, gt=0.0, description="Memory of one GPU of the partition; with it submit refuses what cannot fit."
    )
    cpus_per_rank: PositiveInt = Field(1, description="CPUs of each rank.")
    cpu_bind: Str | None = Field(
        "cores", pattern=r"^[a-z_]+$", description="How srun binds ranks to CPUs (--cpu-bind); none: as the site does."
    )
    memory: Str | None = Field(None, pattern=r"^\d+[KMGT]?$", description="Memory per node as sbatch --mem takes it.")
    time_limit: Str = Field("24:00:00", pattern=r"^[0-9:-]+$", description="Time limit as sbatch --time takes it.")
    signal_seconds: PositiveInt = Field(
        180, description="Seconds before the limit at which the job is signalled to save."
    )
    partition: Str | None = Field(None, description="Partition, as sbatch --partition takes it; none: the default one.")
    account: Str | None = Field(None, description="Account that the job's hours are charged to (sbatch --account).")
    qos: Str | None = Field(None, description="Quality of service (sbatch --qos).")
    constraint: Str | None = Field(None, description="Features that the nodes must have (sbatch --constraint).")
    max_restarts_without_progress: PositiveInt = Field(
        3, description="Restarts without a new checkpoint before giving up."
    )
    exclude: tuple[Str, ...] = Field((), description="Nodes never to be used (sbatch --exclude): 'n7', 'n[10-12]'.")
    preflight: Literal["off", "report", "exclude"] = Field(
        "off",
        description="Check the nodes before each attempt: only say what is slow, or requeue the job away from bad nodes.",
    )
    preflight_seconds: PositiveInt = Field(180, description="Time limit of that check.")
    preflight_tolerance: Fraction = Field(
        0.8, gt=0.0, description="A node is an outlier when it reaches less than this share of the nodes' median."
    )
    container_image: Str | None = Field(None, description="Image that the ranks run in; the batch script does not.")
    container_runtime: Literal["pyxis", "apptainer"] = Field("pyxis", description="What runs the image.")
    container_mounts: tuple[Str, ...] = Field((), description="Folders seen inside: '/scratch', '/data:/corpora'.")
    setup: tuple[Str, ...] = Field((), description="Shell lines run on each job start: module load, activate.")
    environment: dict[str, Str] = Field(
        default_factory=dict, description="Environment variables of the job; no secrets."
    )
    extra_sbatch: tuple[Str, ...] = Field((), description="Further options of sbatch, one a line: --reservation=x.")
    extra_srun: tuple[Str, ...] = Field((), description="Further options of srun: --container-image=...")


Stage = Literal["prepare", "train", "average", "evaluate"]


STAGES: tuple[Stage, ...] = get_args(Stage)
