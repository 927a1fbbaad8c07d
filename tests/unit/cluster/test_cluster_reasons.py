"""Slurm's words and exit codes in words."""

import pytest

from dist_transformer.cluster.reasons import exit_code_in_words, is_held, waiting_in_words
from dist_transformer.errors import EXIT_REQUEUE


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "enough nodes are free"),
        ("Priority", "other jobs come first"),
        ("Dependency", "waits for another job"),
        ("DependencyNeverSatisfied", "never run"),
        ("BeginTime", "about 2 minutes"),
        ("JobHeldUser", "dist-transformer resume"),
        ("JobHeldAdmin", "administrator"),
        ("QOSMaxJobsPerUserLimit", "as many jobs running as your QOS allows"),
        ("QOSMaxWallDurationPerJobLimit", "slurm.time_limit is longer"),
        ("QOSMaxBillingPerUser", "more than the QOS allows"),
        ("QOSGrpCpuLimit", "or it alone asks for more"),
        ("AssocGrpGRES", "share the account together use as much as it allows, or it alone asks for more"),
        ("AssocGrpCPUMinutesLimit", "share the account"),
        ("ReqNodeNotAvail, UnavailableNodes:n[3,7]", "down, drained or reserved"),
        ("ReqNodeNotAvail, May be reserved for other job", "down, drained or reserved"),
        ("ReqNodeNotAvail, Reserved for maintenance", "with less slurm.time_limit"),
        ("PartitionTimeLimit", "longer than the partition allows"),
        ("launch failed requeued held", "a node could not start it"),
        ("launch failure limit exceeded requeued held", "a node could not start it"),
        ("job requeued in held state", "dist-transformer resume"),
        ("ReservationInvalid", "not start"),
        ("MaxGRESRunMinsPerAccount", "more than the QOS allows"),
        ("JobArrayTaskLimit", "tasks of the array"),
        ("", "not looked at it yet"),
    ],
)
def test_a_reason_says_what_is_waited_for(reason: str, words: str) -> None:
    assert words in waiting_in_words(reason)


def test_a_reason_that_is_not_known_is_told_as_it_is() -> None:
    assert waiting_in_words("SomethingOf26.11") == "SomethingOf26.11"


def test_only_a_held_job_waits_for_a_release() -> None:
    named = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue")
    told = ("launch failed requeued held", "launch failure limit exceeded requeued held", "job requeued in held state")
    assert all(map(is_held, (*named, *told)))
    assert not any(map(is_held, ("", "Resources", "BeginTime", "Dependency", "QOSUsageThreshold")))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        *((0, "finished"), (1, "failed"), (2, "mistake"), (70, "no progress"), (75, "saved on request")),
        *(
            (137, "ended by signal SIGKILL, as where memory ran out (slurm.sbatch.mem)"),
            (135, "ended by signal SIGBUS: a mapped file could not be read: its disk failed"),
            (139, "ended by signal SIGSEGV"),
            (250, "exit code 250"),
            (9, "exit code 9"),
        ),
    ],
)
def test_an_exit_code_says_how_it_ended(code: int, words: str) -> None:
    assert words in exit_code_in_words(code)


def test_a_run_that_was_stopped_is_not_said_to_start_again() -> None:
    assert exit_code_in_words(EXIT_REQUEUE) == "saved on request"
