"""No hang: a silent rank says where it stands and leaves with its own code; a lost collective is told in plain words."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import NOT_INHERITED, free_port, without

from dist_transformer.cli import main
from dist_transformer.distributed.causes import exit_code_of, explain, is_of_another
from dist_transformer.distributed.group import LastCollective
from dist_transformer.errors import EXIT_FAILED, EXIT_HANG
from dist_transformer.training.memory import is_out_of_memory
from dist_transformer.training.watchdog import Watchdog

pytestmark = pytest.mark.slow
WATCHED = """
import threading
from dist_transformer.distributed import group
from dist_transformer.training.watchdog import Watchdog
ranks = group.join(60)
ranks.all_gather_object("one")
with Watchdog(1, ranks) as watchdog:
    {body}
"""
LOSING_EACH_OTHER = """
import datetime, os, sys, torch
from dist_transformer.distributed import group
from dist_transformer.distributed.causes import explain
from dist_transformer.training.watchdog import Watchdog
ranks = group.join(60)  # to start may take one of them longer than the limit of what follows
ranks.barrier()
for each in (None, ranks.control):
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds={seconds}), each)
if ranks.rank == 1:
    {second}
try:
    {first}
except RuntimeError as error:
    print(explain(error), flush=True)
    print(ranks.last.text(), flush=True)
os._exit(7)
"""
LEAVE, STAY_AWAY = "os._exit(0)", "sys.stdin.read()"


def run(body: str, seconds: int = 1) -> "subprocess.CompletedProcess[str]":
    """`seconds`: without progress, after which the process ends."""
    program = [sys.executable, "-c", WATCHED.replace("Watchdog(1,", f"Watchdog({seconds},").format(body=body)]
    alone = without(NOT_INHERITED)
    return subprocess.run(program, env=alone, capture_output=True, text=True, timeout=240, check=False)


def run_two(first: str, second: str, seconds: int = 2) -> tuple[int, str, str]:
    """Two ranks of gloo; exit code and streams of rank 0. Rank 1 lives until rank 0 has ended."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    program = textwrap.dedent(LOSING_EACH_OTHER).format(first=first, second=second, seconds=seconds)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [
        subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **place, "RANK": str(rank)}, **pipes)
        for rank in range(2)
    ]
    try:
        out, err = started[0].communicate(timeout=240)
        return started[0].returncode, out, err
    finally:
        for process in started:
            process.kill()
            with process:
                pass


def test_the_time_in_which_the_whole_process_was_stopped_is_no_silence():
    body = "print(flush=True); input(); watchdog._ended.wait(1.5); print(watchdog.stop_seconds)"  # the watch looks once
    program = [sys.executable, "-c", "from dist_transformer.training import watchdog as module\n"
               "module.STOPPED_SECONDS = 0.5" + WATCHED.replace("Watchdog(1,", "Watchdog(4,").format(body=body)]  # fmt: skip
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(program, env=without(NOT_INHERITED), **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)  # longer than its 4 seconds without progress
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate("\n", timeout=240)
    assert (err, float(out) > 3) == ("", True)
    assert process.returncode == 0


def test_no_progress_ends_the_process_with_the_stacks_of_all_threads():
    done = run('watchdog.progress("computing step 7"); threading.Event().wait()')
    assert done.returncode == EXIT_HANG
    assert "rank 0: no progress for" in done.stderr
    assert "while computing step 7; last collective: 1 (gather), ended " in done.stderr
    assert re.search(r'File "<string>", line \d+ in <module>', done.stderr)


def test_a_standard_error_that_takes_no_more_writes_keeps_no_rank_alive(ranks, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        if (pid := os.fork()) == 0:
            try:
                Watchdog(1, ranks)._end(2.0)
            finally:
                os._exit(1)
        monkeypatch.undo()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_HANG


@pytest.mark.parametrize(
    ("num_ranks", "is_over", "code"), [(2, True, EXIT_HANG), (2, False, EXIT_HANG + 100), (1, False, EXIT_HANG)]
)
def test_only_a_rank_that_waits_for_no_other_hangs_itself(ranks, monkeypatch, num_ranks, is_over, code):
    monkeypatch.setenv("DIST_TRANSFORMER_FIRST_EXIT", "x")
    ranks = replace(ranks, num_ranks=num_ranks)
    ranks.barrier()
    monkeypatch.setattr(ranks.last, "ended", ranks.last.ended if is_over else None)
    if (pid := os.fork()) == 0:
        try:
            Watchdog(1, ranks)._end(2.0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code


@pytest.mark.slow
def test_progress_keeps_it_alive():
    body = "event = threading.Event(); [(event.wait(0.05), watchdog.progress('working')) for _ in range(50)]"
    assert run(body, seconds=2).returncode == 0


@pytest.mark.slow
def test_a_rank_that_waits_for_another_names_the_collective_it_is_in():
    code, _, err = run_two(
        "with Watchdog(1, ranks): ranks.all_reduce_sum(torch.zeros(1234, dtype=torch.int64))", STAY_AWAY, 60
    )
    assert code == EXIT_HANG
    assert re.search(r"while starting; in collective 2 \(sum of 1,234 int64\) for \d+ s; where each thread stands", err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("ranks.all_reduce_sum(torch.zeros(29))", "sum of 29 float32"),
        ("ranks.all_gather_object(1)", "gather"),
        ("ranks.start_sum(torch.zeros(29)).wait()", "waiting for the sum of 29 float32, begun ahead"),
        ("ranks.start_mean(torch.zeros(30), False).wait()", "waiting for the mean of 30 float32, begun ahead"),
        ("ranks.start_mean(torch.zeros(30), True).wait()", "waiting for the mean of 30 float32 in shares, begun ahead"),
        (
            "ranks.start_gather(torch.zeros(30), torch.zeros(15)).wait()",
            "waiting for the gather of 30 float32, begun ahead",
        ),
    ],
)
def test_a_rank_that_stays_away_is_told_as_such(first, name):
    code, out, _ = run_two(first, STAY_AWAY)
    assert code == 7
    assert out.startswith("a rank did not come to a collective within training.hang_seconds: look for one that hangs")
    assert re.search(rf"in collective \d \({name}\) for \d+ s", out)


def test_a_rank_that_has_left_is_told_as_such():
    code, out, _ = run_two("ranks.all_reduce_sum(torch.zeros(1000))", LEAVE, 30)
    assert code == 7
    assert out.startswith("another rank has left in the middle of a collective: look for the first rank that failed")


@pytest.mark.slow
def test_errors_after_the_first_keep_their_cause():
    """gloo closes the pair at a time limit, and says so of every later collective."""
    code, out, _ = run_two(
        "try: ranks.all_reduce_sum(torch.zeros(9))\n    except RuntimeError: ranks.barrier()", STAY_AWAY
    )
    assert code == 7
    assert out.startswith("a rank did not come to a collective within")


JOINING = """
from dist_transformer.distributed import group
from dist_transformer.errors import MachineError
try:
    group.join({seconds})
except MachineError as error:
    print(error, error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said", "code"),
    [
        ({"WORLD_SIZE": "2"}, "not all ranks came together within training.hang_seconds", EXIT_FAILED + 100),
        (
            {"WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth77"},
            "GLOO_SOCKET_IFNAME names no interface of this node",
            EXIT_FAILED,
        ),
    ],
)
def test_a_rank_that_was_never_started_and_a_network_that_is_not_there_are_told_as_such(given, said, code):
    check_that_joining_ends(given, said, code)


@pytest.mark.slow
def test_a_port_that_another_process_has_is_told_as_such():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"WORLD_SIZE": "1", "MASTER_PORT": str(taken.getsockname()[1])}
        check_that_joining_ends(given, "another process of this node has the port MASTER_PORT", EXIT_FAILED)


def check_that_joining_ends(given, said, code):
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "DIST_TRANSFORMER_FIRST_EXIT": "x",
        **given,
    }
    command = [sys.executable, "-c", JOINING.format(seconds=1)]
    out = subprocess.run(
        command, env={**os.environ, **place}, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    assert "cannot join the others: " in out
    assert said in out
    assert out.endswith(f" {code}\n")


TWO_NETWORKS = """
ip link set lo up
unshare --net sh -c '
  ip link set lo up
  until ip addr add 10.77.0.2/24 dev vb; do sleep 0.1; done
  ip link set vb up
  RANK=1 exec "$@"' sh "$@" &
while [ "$(readlink /proc/$!/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.1; done
ip link add va type veth peer name vb netns $!
ip addr add 10.77.0.1/24 dev va
ip link set va up
RANK=0 "$@" &
wait -n
kill -KILL $(jobs -p)
"""
"""Two ranks on nodes with a network between them: the first that fails ends the other, which might wait for long."""
COMING_TOGETHER = """
import os
from datetime import timedelta
import torch.distributed
met = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], 29501, 2, os.environ["RANK"] == "0", timedelta(minutes=9))
"""
"""Run first: a rank may take long to import torch."""


@pytest.mark.slow
def test_a_node_that_gives_the_others_a_loopback_address_is_told_as_such():
    """As gloo does where the name of the node is 127.0.1.1 in /etc/hosts."""
    command = ["sh", "-c", "unshare --net ip link add va type veth peer name vb"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("two networks need root and ip, as the tests of Slurm do")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
    program = COMING_TOGETHER + JOINING.format(seconds=5)
    command = ["unshare", "--net", "bash", "-c", TWO_NETWORKS, "bash", sys.executable, "-c", program]
    environment = {**os.environ, **place, "DIST_TRANSFORMER_FIRST_EXIT": "x"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert "cannot join the others: a rank cannot connect to the address of another: a firewall, or " in done.stdout
    assert done.stdout.endswith(f" {EXIT_FAILED + 100}\n")


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
            r"locked memory .*: `ulimit -l unlimited`",
        ),
        ("Error while creating shared memory segment /dev/shm/nccl-q3Ab (size 9637888)", "lacks room in /dev/shm"),
    ],
)
def test_what_nccl_lacks_on_a_node_is_a_fault_of_that_node_and_none_of_the_settings(last, said, monkeypatch):
    monkeypatch.setenv("DIST_TRANSFORMER_FIRST_EXIT", "x")
    error = torch.distributed.DistBackendError(
        f"NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\n{last}"
    )
    assert re.search(said, explain(error))
    assert last in explain(error)
    assert exit_code_of(explain(error)) == EXIT_FAILED
    assert exit_code_of(explain(RuntimeError("Connection reset by peer"))) == EXIT_FAILED + 100
    assert not is_of_another(explain(error))  # it is written into the run's log
    assert not is_out_of_memory(error)


def test_a_rank_that_loses_another_before_it_trains_ends_with_its_message(monkeypatch, capsys):
    """As while rank 0 takes the lock of the run folder."""

    def lost() -> None:
        raise RuntimeError("Read error [127.0.0.1]:38041: Connection reset by peer")

    monkeypatch.setenv("DIST_TRANSFORMER_FIRST_EXIT", "x")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(main, "leave", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main.run_as_command(lost)
    assert ended.value.code == EXIT_FAILED + 100
    assert "dist-transformer: another rank has left in the middle of a collective: " in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="Connection reset"):  # of another library
        main.run_as_command(lost)


@pytest.mark.parametrize("said", ["can't start new thread", "Resource temporarily unavailable"])
def test_a_rank_that_can_start_no_more_threads_is_no_victim_of_another(said, monkeypatch):
    monkeypatch.setenv("DIST_TRANSFORMER_FIRST_EXIT", "x")
    cause = explain(RuntimeError(said))
    assert "no new thread can start: " in str(cause)
    assert exit_code_of(cause) == EXIT_FAILED


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("Call to ibv_modify_qp failed with 110 Connection timed out"),
        RuntimeError("Error while attaching to shared memory segment /dev/shm/nccl-q3Ab: No such file"),
        ValueError("Broken pipe"),
    ],
)
def test_any_other_error_is_not_explained(error):
    assert explain(error) is None


def test_a_collective_that_is_only_noted_does_not_pretend_to_know_its_end(monkeypatch):
    from dist_transformer.distributed import group

    now = 100.0
    monkeypatch.setattr(group.time, "monotonic", lambda: now)
    last = LastCollective()
    assert last.text() == "no collective yet"
    last.begin("all_reduce of 123,456 float16", is_followed=False)
    now = 161.0
    assert last.text() == "last collective: 1 (all_reduce of 123,456 float16), begun 61 s ago"


def test_begin_and_end_are_both_told(monkeypatch, ranks):
    from dist_transformer.distributed import group

    now = 100.0
    monkeypatch.setattr(group.time, "monotonic", lambda: now)
    number = ranks.last.number + 1
    with ranks.collective("gather"):
        now = 110.0
        assert ranks.last.text() == f"in collective {number} (gather) for 10 s"
    now = 171.0
    assert ranks.last.text() == f"last collective: {number} (gather), ended 61 s ago"


SEGMENTS = """
import torch
from dist_transformer.distributed import group
group.join(60)
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_memory_of_gpus_is_taken_in_segments_that_grow_unless_a_person_says_otherwise(given, found):
    """torch itself is asked what it has read."""
    environment = {**without([*NOT_INHERITED, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]), **given}
    done = subprocess.run(
        [sys.executable, "-c", SEGMENTS], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip() == found, done.stderr
