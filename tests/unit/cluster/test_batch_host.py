"""A node of the job looks after it where that of the batch script is gone, with programs that answer like Slurm's."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from batch_job_helpers import RECORD, Slurm, wait_for

from dist_transformer.cluster.batch_host import TRIES, watch
from dist_transformer.cluster.requeue import note_begin

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with contextlib.closing(Slurm(tmp_path)) as made:
        yield made


def test_another_node_requeues_a_job_from_which_slurm_has_taken_the_one_of_its_batch_script(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.run("exit 0")  # writes the programs
    (slurm.folder / "calls").unlink()
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    monkeypatch.setattr("dist_transformer.cluster.batch_host.POLL_SECONDS", 0.0)
    (slurm.folder / "job").write_text(RECORD.replace("BatchHost=n1", "BatchHost=n7"))
    watch("7", 0, slurm.run_dir)
    assert slurm.calls("scontrol requeue 7") == 1
    assert slurm.ends()[-1] == (None, "lost", True)
    watch("7", 1, slurm.run_dir)  # another attempt
    assert slurm.calls("scontrol requeue 7") == 1


TAKEN = RECORD.replace("BatchHost=n1", "BatchHost=n7").replace("RUNNING", "COMPLETING")
AGAIN = TAKEN.replace("Restarts=0", "Restarts=1")


@pytest.mark.parametrize(
    ("record", "has_ended", "requeues", "excludes"),
    [
        (AGAIN, False, 0, 1),  # back before Slurm missed it, which has requeued the job
        (AGAIN, True, 0, 0),  # the batch script requeued it, and its node has left the job first
        (TAKEN.replace("Reason=None", "Reason=JobLaunchFailure"), False, 1, 1),  # set down
        (TAKEN, False, 0, 0),  # a person cancels what is left of the job
        (RECORD, False, 0, 0),  # this watch alone is ended
    ],
)
def test_at_term_the_other_node_sees_whether_that_of_the_batch_script_was_taken(
    slurm: Slurm, record: str, has_ended: bool, requeues: int, excludes: int
) -> None:
    """The new list of excluded nodes is refused once, as if the job were still at work."""
    slurm.programs["scontrol"] += "\n" + '[[ "$*" != *Exc* || $(grep -c Exc {folder}/calls) -gt 1 ]]'
    slurm.programs["sinfo"] = "printf '%s|idle|f|g\\n' n1 n2 n3 n4 n7"
    slurm.run("exit 0")  # writes the programs
    (slurm.folder / "calls").unlink()
    if not has_ended:
        note_begin(slurm.run_dir, "7", 0, "n[1-2]", 2)
    module = [sys.executable, "-m", "dist_transformer.cluster.batch_host", "7", "0", str(slurm.run_dir.path)]
    process = subprocess.Popen(module, env={**os.environ, "PATH": f"{slurm.folder}:/usr/bin:/bin"})
    wait_for(lambda: ignores(process.pid, signal.SIGUSR2))  # from then on it waits for TERM
    (slurm.folder / "job").write_text(record)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0
    assert slurm.calls("scontrol requeue 7") == requeues
    assert slurm.calls("scontrol update JobId=7 ExcNodeList=n7") == 2 * excludes
    assert [end for end in slurm.ends() if end[1] == "lost"] == [(None, "lost", True)] * excludes


@pytest.mark.parametrize("fault", ["no disk", "sinfo does not answer", "sinfo times out once"])
def test_neither_a_disk_nor_a_slow_controller_keeps_the_job_from_being_requeued(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault != "no disk":
        until = 9 if "once" not in fault else 1
        slurm.programs["sinfo"] = "[ $(grep -c ^sinfo {folder}/calls) -gt UNTIL ] || exit 1".replace(
            "UNTIL", str(until)
        )
    slurm.run("exit 0")  # writes the programs
    (slurm.folder / "calls").unlink()
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    monkeypatch.setattr("dist_transformer.cluster.batch_host.POLL_SECONDS", 0.0)
    (slurm.folder / "job").write_text(RECORD.replace("BatchHost=n1", "BatchHost=n7"))
    before = len(slurm.ends())
    if fault == "no disk":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr("dist_transformer.cluster.batch_host.note_lost_host", Mock(side_effect=full))
    watch("7", 0, slurm.run_dir)
    assert slurm.calls("scontrol requeue 7") == 1
    assert len(slurm.ends()) == before + (fault != "no disk")  # noted once
    assert slurm.calls("sinfo") == {"no disk": 1, "sinfo does not answer": TRIES, "sinfo times out once": 2}[fault]


def ignores(pid: int, number: signal.Signals) -> bool:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)
