"""Slurm's reasons and exit codes as text from which a user knows what to do."""

import signal
from contextlib import suppress

from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE, EXIT_USER_ERROR, OF_SIGBUS

# The longest matching prefix counts: Slurm appends details (", UnavailableNodes:n3") and adds similar reasons.
_WAITING = {
    "Resources": "it is next: waits until enough nodes are free",
    "Priority": "other jobs come first",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "the job that it waits for has failed: it will never run; cancel it",
    "BeginTime": "its time has not come (a job that was put back into the queue is held back for about 2 minutes)",
    "JobHeldUser": "held by its owner: `dist-transformer resume` or `scontrol release` releases it",
    "JobHeldAdmin": "held by an administrator: ask them",
    "JobHoldMaxRequeue": "held: Slurm put it back into the queue too often; look at its log, then `dist-transformer resume`",
    "JobArrayTaskLimit": "as many tasks of the array run as its limit allows",
    "QOSMaxJobsPerUserLimit": "you have as many jobs running as your QOS allows",
    "QOSMaxSubmitJobPerUserLimit": "you have as many jobs submitted as your QOS allows",
    "QOSMaxWallDurationPerJobLimit": "slurm.time_limit is longer than your QOS allows: submit it with less",
    "QOSMaxGRESPerUser": "you use as many GPUs as your QOS allows",
    "QOSMaxCpuPerUserLimit": "you use as many CPUs as your QOS allows",
    "QOSMaxNodePerUserLimit": "you use as many nodes as your QOS allows",
    "QOSNotAllowed": "the QOS is not allowed here: it will not start; change slurm.sbatch.qos or slurm.sbatch.partition",
    "QOSMin": "it asks for less than the QOS demands: it will not start",
    "QOSGrp": "all who share the QOS together use as much as it allows, or it alone asks for more",
    "QOSMax": "it, or your jobs together, ask for more than the QOS allows",
    "QOS": "a limit of the QOS",
    "AssocMaxWallDurationPerJobLimit": "slurm.time_limit is longer than your account allows: submit it with less",
    "AssocMaxJobsLimit": "your account has as many jobs running as it may",
    "AssocGrp": "all who share the account together use as much as it allows, or it alone asks for more",
    "AssocMax": "it, or your jobs together, ask for more than the account allows",
    "AssociationJobLimit": "your account has as many jobs running as it may",
    "InvalidAccount": "the account is not known to Slurm: it will not start; change slurm.sbatch.account",
    "InvalidQOS": "the QOS is not known to Slurm: it will not start; change slurm.sbatch.qos",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved for others",
    "ReqNodeNotAvail, Reserved for maintenance": "it reaches into a maintenance: begins after it, or with less slurm.time_limit",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for: it will not start; change slurm.sbatch.constraint",
    "PartitionConfig": "it asks for something that the partition does not have",
    "PartitionTimeLimit": "slurm.time_limit is longer than the partition allows: it will not start; submit it with less",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows: it will not start",
    "PartitionDown": "the partition does not start jobs now",
    "PartitionInactive": "the partition is switched off",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted: it will not start",
    "ReservationInvalid": "its reservation is not valid: it will not start",
    "Licenses": "waits for licences",
    "MaxPoweredUpNodes": "as many nodes are powered up as the site allows",
    "Cleaning": "the nodes of its last attempt are being cleaned up",
    "job requeued in held state": "held by `scontrol requeuehold`: `dist-transformer resume` releases it",
    "launch fail": "a node could not start it, so it is held: `dist-transformer resume` releases it",
    "user env retrieval failed requeued held": "held: a node cannot read your environment: `dist-transformer resume` releases it",
    "DeadLine": "it cannot end before its deadline: it will not start",
    "Max": "it, or the jobs of your account together, ask for more than the QOS allows",
    "MaxMemPerLimit": "it asks for more memory than a limit of the site allows",
    "FedJobLock": "waits for the clusters of the federation to agree",
    "BurstBuffer": "waits for the burst buffer",
    "Prolog": "its nodes are being prepared",
    "SchedDefer": "Slurm has put off scheduling for now",
    "PrivateData": "Slurm hides the jobs of other users here: ask its owner",
    "None": "Slurm has not looked at it yet",
}

_EXIT_CODES = {
    EXIT_DONE: "finished",
    EXIT_FAILED: "failed",
    EXIT_USER_ERROR: "a mistake that somebody must fix",
    EXIT_HANG: "a rank made no progress (training.hang_seconds)",
    EXIT_REQUEUE: "saved on request",
    128 + signal.SIGKILL: "ended by signal SIGKILL, as where memory ran out (slurm.sbatch.mem): see the log",
}

SAID_BY_EXIT_CODE = ("done", "a mistake that a restart cannot fix")
"""Reasons of the batch script's decision that add nothing to the exit code."""


def is_held(reason: str) -> bool:
    """True if a job with this reason waits for somebody to release it."""
    return reason.startswith(("JobHeld", "JobHold")) or "held" in reason


def waiting_in_words(reason: str) -> str:
    """Explanation why a job waits; Slurm's own reason where we have none."""
    if not reason:
        return _WAITING["None"]
    known = sorted((word for word in _WAITING if reason.startswith(word)), key=len)
    return _WAITING[known[-1]] if known else reason


def exit_code_in_words(code: int) -> str:
    """Explanation of the exit code of an attempt or a rank."""
    if code in _EXIT_CODES:
        return _EXIT_CODES[code]
    with suppress(ValueError):  # not the code of a signal
        return f"ended by signal {OF_SIGBUS if code - 128 == signal.SIGBUS else signal.Signals(code - 128).name}"
    return f"exit code {code}"
