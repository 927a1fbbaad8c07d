"""Memory of a rank: which limit counts, what a peak is, and what is said when memory has run out."""

import dataclasses
import mmap
import re
import resource
import threading

import psutil
import pytest
import torch

from dist_transformer.cli.main import run_as_command
from dist_transformer.distributed.rounds import WorkFailed
from dist_transformer.errors import MachineError, UserError
from dist_transformer.training import memory
from dist_transformer.training.memory import (
    RESERVED_ADDRESS_BYTES,
    Allowance,
    allowance,
    as_text,
    begin_peak,
    cgroup_allowances,
    explaining_out_of_memory,
    is_out_of_memory,
    peak,
)

CPU = torch.device("cpu")


def write_cgroup(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def version_2(limit, used, cache):
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def version_1(limit, used, cache):
    stat = f"cache 7\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def left(cgroups, membership):
    return [found.bytes for found in cgroup_allowances(cgroups, membership)]


def test_a_job_and_its_step_are_both_asked_and_file_cache_counts_as_free(tmp_path):
    write_cgroup(tmp_path / "system.slice" / "job_7", version_2(1000, 400, 50))
    write_cgroup(tmp_path / "system.slice" / "job_7" / "step_0", version_2("max", 300, 50))
    assert left(tmp_path, "0::/system.slice/job_7/step_0\n") == [1000 - 400 + 50]


def test_the_older_kind_of_cgroup_is_read_too_and_other_controllers_are_not(tmp_path):
    write_cgroup(tmp_path / "memory" / "slurm" / "job_7", version_1(2000, 1500, 100))
    write_cgroup(tmp_path / "memory" / "slurm", version_1(5000, 1500, 100))
    write_cgroup(tmp_path / "cpu" / "slurm" / "job_7", version_1(1, 1, 1))
    membership = "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n"
    assert left(tmp_path, membership) == [600, 3600]


def test_in_a_container_whose_path_is_one_of_the_host_the_root_is_asked(tmp_path):
    write_cgroup(tmp_path, version_2(1000, 100, 0))
    assert left(tmp_path, "0::/docker/abc\n") == [900]


def test_no_cgroup_or_no_limit_says_nothing(tmp_path):
    write_cgroup(tmp_path / "free", version_2("max", 100, 0))
    assert left(tmp_path, "0::/free\n1:name=systemd:/\n") == []


def test_ranks_of_one_machine_share_its_memory(ranks, monkeypatch, tmp_path):
    left = psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: left)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)  # without a limit
    of_four = allowance(dataclasses.replace(ranks, ranks_per_node=4))
    assert of_four == Allowance(2 * 10**8, "the machine's memory")
    assert allowance(ranks) == Allowance(8 * 10**8, "the machine's memory")


def fill(size):
    """Uses memory that no allocator holds before or afterwards."""
    with mmap.mmap(-1, size) as memory_map:
        for first in range(0, size, mmap.PAGESIZE):
            memory_map[first] = 1


def test_the_peak_is_that_since_it_was_begun_and_not_of_all_the_process(ranks):
    fill(400_000_000)
    before = begin_peak(CPU)
    fill(200_000_000)
    assert peak(CPU) - before == pytest.approx(200e6, rel=0.05)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes. Error"),
            4e9,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has"), 1.5 * 2**30),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"), 20 * 2**20),
    ],
)
def test_the_message_says_what_was_done_how_much_was_wanted_what_is_left_and_what_to_do(error, wanted):
    with pytest.raises(UserError) as raised, explaining_out_of_memory("the dry run", CPU):
        raise error
    message = str(raised.value)
    assert message.startswith(f"out of memory in the dry run: {as_text(wanted)} more were asked for; ")
    assert re.search(r"in use by this rank, [\d,.]+ [GM]B are left \(the \w+'s memory|cgroup", message)
    for way_out in ("data.max_tokens", "activation_checkpointing", "zero_stage", "offload", "bf16"):
        assert way_out in message


def test_a_memory_error_without_a_size_and_one_of_the_allocator_itself_are_told_too():
    for error in (MemoryError(), RuntimeError("std::bad_alloc")):
        with (
            pytest.raises(UserError, match=r"^out of memory in x: [\d,.]+ [GM]B are in use"),
            explaining_out_of_memory("x", CPU),
        ):
            raise error


BESIDE_TORCHS_ALLOCATOR = [
    torch.AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    torch.distributed.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    torch.distributed.DistBackendError("ncclUnhandledCudaError\nLast error:\nFailed to CUDA calloc async 608 bytes"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("could not execute a primitive"),
]
"""Messages as torch, NVIDIA's libraries and oneDNN write them when they find no memory for themselves."""


def test_a_cpu_that_cannot_do_an_operation_is_not_short_of_memory():
    said = "could not create a primitive descriptor for a matmul primitive. Run workload with environment variable"
    with pytest.raises(RuntimeError, match="primitive descriptor"), explaining_out_of_memory("x", CPU):
        raise RuntimeError(said)


@pytest.mark.parametrize("error", BESIDE_TORCHS_ALLOCATOR, ids=lambda error: str(error).splitlines()[-1][:30])
def test_libraries_that_are_out_of_memory_are_told_like_torchs_allocator(error):
    with pytest.raises(UserError, match=r"^out of memory in x: .*data\.max_tokens"), explaining_out_of_memory("x", CPU):
        raise error


def test_a_gpu_that_answers_nothing_any_more_hides_no_advice(monkeypatch):
    def broken(device):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    with (
        pytest.raises(UserError, match=r"^out of memory in x: .*data\.max_tokens"),
        explaining_out_of_memory("x", torch.device("cuda", 0)),
    ):
        raise BESIDE_TORCHS_ALLOCATOR[0]


@pytest.mark.parametrize(("others", "kind"), [(30e9, MachineError), (5e9, UserError)])
def test_a_gpu_that_other_processes_fill_is_a_fault_of_the_machine_and_no_reason_for_advice(monkeypatch, others, kind):
    """Less than a tenth may be CUDA's and NCCL's own for this process."""
    total, of_torch, free = 80e9, 20e9, 1e9
    used = {"memory_allocated": of_torch, "memory_reserved": total - others - free}
    for name, count in used.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    with pytest.raises(UserError) as raised, explaining_out_of_memory("the dry run", torch.device("cuda", 0)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    message = str(raised.value)
    assert raised.type is kind
    assert "in the dry run: " in message
    assert ("other processes hold 30.0 GB of the GPU's 80.0 GB (nvidia-smi)" in message) is (kind is MachineError)
    assert ("data.max_tokens" in message) is (kind is UserError)
    assert is_out_of_memory(WorkFailed(message)) is (kind is UserError)


def test_other_errors_pass_unchanged():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not is_out_of_memory(error)
    with pytest.raises(RuntimeError) as raised, explaining_out_of_memory("x", CPU):
        raise error
    assert raised.value is error


def test_what_torch_really_raises_for_too_large_a_tensor_is_known():
    most = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**40, most[1]))
        with (
            pytest.raises(UserError, match=f"{as_text(2**42)} more were asked for"),
            explaining_out_of_memory("x", CPU),
        ):
            torch.empty(2**40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)


def test_a_command_that_is_out_of_memory_ends_with_a_message_and_any_other_fault_with_its_traceback(
    monkeypatch, capsys
):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        run_as_command(lambda: torch.empty(2**47))
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "out of memory (" in said
    assert "decoding.max_tokens (translate --max-tokens) or the beam" in said
    with pytest.raises(RuntimeError, match="must match"):
        run_as_command(lambda: torch.ones(2) + torch.ones(3))


def test_the_least_of_several_limits_counts(ranks):
    most = resource.getrlimit(resource.RLIMIT_AS)
    size = psutil.Process().memory_info().vms
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size + RESERVED_ADDRESS_BYTES + 500_000_000, most[1]))
        found = allowance(dataclasses.replace(ranks, ranks_per_node=1))
        shared = allowance(dataclasses.replace(ranks, ranks_per_node=2))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)
    assert found.limited_by == "ulimit -v"
    assert found.bytes == pytest.approx(0.8 * 500e6, rel=0.02)
    assert shared == Allowance(shared.bytes, "ulimit -v")
    assert shared.bytes == pytest.approx(found.bytes, rel=0.02)  # of one process, not of the machine


@pytest.mark.parametrize(("count", "text"), [(1_500_000_000, "1.5 GB"), (2_000_000, "2 MB"), (12e12, "12,000.0 GB")])
def test_bytes_are_written_for_people(count, text):
    assert as_text(count) == text


def test_a_command_that_can_start_no_more_threads_names_the_limits_and_the_settings(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    before = threading.stack_size(2**46)  # more than a process has addresses: the kernel refuses it as under a limit
    try:
        with pytest.raises(SystemExit) as ended:
            run_as_command(threading.Thread(target=print).start)
    finally:
        threading.stack_size(before)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "dist-transformer: no new thread can start: " in said
    assert all(name in said for name in ("`ulimit -u`", "-v", "--ranks", "data.loader_workers", "OMP_NUM_THREADS"))
