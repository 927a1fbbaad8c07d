"""Causes of failed collectives, found in the messages of gloo, NCCL and torch's store, and the exit code of each."""

import os
import re

from dist_transformer.errors import EXIT_FAILED

_CAUSES_HERE = (
    (
        "can't start new thread|^Resource temporarily unavailable",
        "no new thread can start: raise `ulimit -u` (-v, the job's pids), or lower --ranks, data.loader_workers, OMP_NUM_THREADS",
    ),
    (
        "Unable to find address for",
        "GLOO_SOCKET_IFNAME names no interface of this node that has an address (`ip -br addr`): correct it",
    ),
    (
        "EADDRINUSE|address already in use",
        "another process of this node has the port MASTER_PORT: start again, which takes another port, or give a free one",
    ),
    (
        r"ibv_\w+ failed.*[Cc]annot allocate memory",
        "NCCL lacks locked memory for the network card: `ulimit -l unlimited` where slurmd starts, or --ulimit memlock=-1 of "
        "the container",
    ),
    (
        "(creating shared memory segment|failed to extend) /dev/shm/nccl",
        "NCCL lacks room in /dev/shm: give the container more (--shm-size), or the host's",
    ),
)
"""Pairs of a pattern of the messages of gloo, NCCL, torch's store and Python, and the cause it stands for, on this node."""
_CAUSES = (
    (
        r"Timed out waiting \d+ms for|Watchdog caught collective operation timeout|Application timeout caused pair closure",
        "a rank did not come to a collective within training.hang_seconds: look for one that hangs, or is far slower",
    ),
    (
        r"Connection (closed by peer|reset by peer)|Broken pipe|Read error|remote process exited|NCCL communicator was aborted",
        "another rank has left in the middle of a collective: look for the first rank that failed",
    ),
    (
        r"waiting for clients|wait timeout after|client socket has (timed out|failed)",
        "not all ranks came together within training.hang_seconds: is each started, and does each reach MASTER_ADDR?",
    ),
    (
        "connectFullMesh failed",
        "a rank cannot connect to the address of another: a firewall, or a name that is 127.0.x.x in /etc/hosts, as on Debian: "
        "give the network's interface (`ip -br addr`) in GLOO_SOCKET_IFNAME (slurm.environment)",
    ),
)
"""The same for causes that are with another rank."""


def explain(error: BaseException) -> str | None:
    """Returns one line on the cause of a failed collective, or of a thread that did not start; None for any other error."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    here = next(
        (f"{cause} ({said.splitlines()[-1]})" for pattern, cause in _CAUSES_HERE if re.search(pattern, said)), None
    )
    return here or next((cause for pattern, cause in _CAUSES if re.search(pattern, said)), None)


def exit_code_of(cause: str | None) -> int:
    """Exit code of a rank that failed with this cause, as `explain` found it: a victim's if another rank is the cause."""
    return exit_code_of_victim(EXIT_FAILED) if is_of_another(cause) else EXIT_FAILED


def is_of_another(cause: str | None) -> bool:
    """True if `explain` returned this cause for what another rank did."""
    return cause in [told for _, told in _CAUSES]


def exit_code_of_victim(code: int) -> int:
    """Exit code of a rank that only lost or waited for another: 100 more, where launch/slurm_task.sh takes them off again."""
    return code + 100 if "DIST_TRANSFORMER_FIRST_EXIT" in os.environ else code
