"""The calls of sbatch: one for each stage of a run.

    prepare -> train -> average -> evaluate      each waits until the one before it has succeeded

Training has the configured nodes; the other stages are one task on one node.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.config.slurm_schema import SlurmConfig, command_options, listed
from dist_transformer.run.folder import RunDir

COMMENT = "dist-transformer:"
"""Prefix of the run folder in a job's comment, by which the jobs of this program are found."""

_SCRIPTS = {"prepare": "prepare.sbatch", "train": "train.sbatch", "translate": "translate.sbatch"}


@dataclass(frozen=True)
class Job:
    """One call of sbatch. One element per option, so that no value can become another option. `script`: a copy of the
    file of its name in slurm/."""

    stage: str
    options: tuple[str, ...]
    script: Path
    arguments: tuple[str, ...]

    def sbatch_arguments(self, after: Sequence[str] = ()) -> list[str]:
        """The argv without the program; `after`: jobs that must succeed before this one begins."""
        # Otherwise a job whose dependency failed would wait forever.
        waits = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
        return [*self.options, *waits, str(self.script), *self.arguments]


def job_of(
    stage: str, slurm: SlurmConfig, run_dir: RunDir, excluded: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Job:
    """The job of one stage of a run, or of a node of a pipeline; `run_dir` is absolute.

    Args:
        excluded: nodes that the run avoids, besides slurm.sbatch.exclude.
        arguments: those of the script, if it works on more than the run folder.
    """
    is_train = stage == "train"
    logs = f"{str(run_dir.slurm).replace('%', '%%')}/{'job' if is_train else stage}-%j.log"
    name = run_dir.name if is_train else f"{run_dir.name}-{stage}"
    wanted = {"job-name": name, "comment": f"{COMMENT}{run_dir.path}", "output": logs}
    given = {name: value for name, value in slurm.sbatch.items() if name != "gres"}
    avoided = tuple(dict.fromkeys([*listed(given.get("exclude") or ()), *excluded]))
    wanted |= _resources(stage, slurm) | given | {"exclude": avoided}
    path = str(run_dir.path)
    words = arguments or ((path,) if stage in _SCRIPTS else (stage, path))
    options = ("--parsable", "--requeue", *command_options(wanted))
    return Job(stage, options, run_dir.slurm / _SCRIPTS.get(stage, "command.sbatch"), tuple(words))


def _resources(stage: str, slurm: SlurmConfig) -> dict[str, Any]:
    # To the batch script of training, which forwards it, else to srun's processes; the other stages save nothing on the way.
    told = {"train": "B:", "prepare": "", "translate": ""}.get(stage)
    signal = None if told is None else f"{told}USR1@{slurm.signal_seconds}"
    common = {"time": slurm.time_limit, "signal": signal, "open-mode": "append"}
    gres = ",".join(map(str, listed(slurm.sbatch.get("gres") or ())))
    if stage in ("train", "translate"):
        tasks, cpus = slurm.ranks_per_node, slurm.cpus_per_rank
        nodes, gpus = slurm.nodes + (slurm.spare_nodes if stage == "train" else 0), slurm.gpus_per_node
    else:
        on_gpu = stage != "prepare" and slurm.gpus_per_node > 0
        cpus = slurm.cpus_per_rank * (slurm.ranks_per_node if stage == "prepare" else 1)
        nodes, tasks, gpus = 1, 1, int(on_gpu)
        gres = re.sub(r"(?<![^,])(gpu[^,]*):\d+(?=,|$)", r"\1:1", gres) if on_gpu else ""  # gpu:h200:1,nvme:400
    asked = {"gres": gres} if gres else {"gpus-per-node": gpus or None}
    return {"nodes": nodes, "ntasks-per-node": tasks, "cpus-per-task": cpus, **asked, **common}
