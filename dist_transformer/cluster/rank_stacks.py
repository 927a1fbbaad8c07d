"""The stacks of all ranks of a run: from each node of its Slurm job, else from this machine."""

import platform
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_transformer.cluster.queue import QueuedJob
from dist_transformer.cluster.slurm import host_names, run_on_each_node
from dist_transformer.errors import UserError
from dist_transformer.processes.stacks import Dump, dump_local, rank_processes
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import records_of


@dataclass(frozen=True)
class NodeStacks:
    """Answer of one node. `problem`: why it has no stacks."""

    node: str
    dumps: tuple[Dump, ...]
    problem: str | None


def stacks_of_job(run_dir: RunDir, job: QueuedJob) -> list[NodeStacks]:
    """Asks each node of a running job for its stacks, by a job step beside its ranks. Raises SlurmError: Slurm could not
    start the step, and no node answered."""
    code = run_dir.snapshot if run_dir.snapshot.is_dir() else Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "dist_transformer.processes.stacks", job.number]
    lines = run_on_each_node(job.number, job.num_nodes, command, {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"})
    return by_node(host_names(job.nodes), lines)


def by_node(nodes: list[str], lines: list[str]) -> list[NodeStacks]:
    """Sorts the answers, which come in any order and may be mixed with other output, by node and rank."""
    ranks: dict[str, int] = {}
    dumps: dict[str, dict[int, Dump]] = defaultdict(dict)
    for answer in records_of(lines):
        if "node" in answer:
            ranks[answer["node"]] = answer["ranks"]
        elif "rank" in answer:
            line = Dump(**answer)
            before = dumps[line.host].get(line.rank)
            dumps[line.host][line.rank] = replace(line, text=before.text + line.text) if before else line
    silent = "it did not answer: is it alive, and on the network?"
    none = "no rank here has registered: they are still starting, or have ended"
    problems = {node: silent if node not in ranks else None if ranks[node] else none for node in nodes}
    return [NodeStacks(node, tuple(dump for _, dump in sorted(dumps[node].items())), problems[node]) for node in nodes]


def stacks_here(run_dir: RunDir, owner: Mapping[str, Any]) -> NodeStacks:
    """The ranks of a run that was started on this machine without Slurm; `owner`: the content of owner.json, the process
    that trains. Raises UserError: the run is on another machine, or no longer running."""
    host = platform.node()
    if owner.get("host") != host:
        raise UserError(f"{run_dir.path}: is trained on {owner.get('host')}, this is {host}; ask there")
    first = next((process for process in rank_processes() if process.pid == owner.get("pid")), None)
    if first is None:
        raise UserError(f"{run_dir.path}: process {owner.get('pid')} (owner.json) does not run here as a rank of yours")
    return NodeStacks(host, tuple(dump_local(first.job)), None)
