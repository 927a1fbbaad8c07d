"""The precision of a run: what `auto` is where, and what a machine refuses or warns of."""

from typing import Any

import pytest
import torch

from dist_transformer.config.schema import Config
from dist_transformer.distributed import group
from dist_transformer.distributed.group import has_gpus
from dist_transformer.errors import MachineError, UserError
from dist_transformer.processes.stop_request import StopRequest
from dist_transformer.run.folder import RunDir
from dist_transformer.training.metrics.console import Terminal
from dist_transformer.training.precision import FP16_ON_CPU, bf16_warning, resolve_precision
from dist_transformer.training.rank import train_rank

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def config_of(precision: str | None = None, **sections: Any) -> Config:
    training = {} if precision is None else {"precision": precision}
    return Config.model_validate({"data": {"train": {"demo": "train"}}, "training": training, **sections})


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "fp16"), (False, "fp32")])
def test_without_a_word_a_run_trains_in_fp16_on_gpus_and_in_fp32_on_cpus_and_says_so(
    has_gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FP16_ON_CPU, raising=False)
    config, said = resolve_precision(config_of(), has_gpu)
    assert config.training.precision == expected
    assert said.startswith(expected)
    assert "training.precision: auto" in said
    assert resolve_precision(config, has_gpu) == (config, "")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_precision_that_is_given_stays_on_a_gpu(precision: str) -> None:
    assert resolve_precision(config_of(precision), has_gpu=True) == (config_of(precision), "")


def test_fp16_without_a_gpu_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FP16_ON_CPU, raising=False)
    with pytest.raises(UserError) as raised:
        resolve_precision(config_of("fp16"), has_gpu=False)
    for words in ("expected fp32 or bf16", "got fp16", "training.precision=fp32", "resumes from its checkpoints"):
        assert words in str(raised.value)
    assert not raised.value.is_agreed, "another node may have its GPUs"


def test_what_forbids_the_precision_that_was_found_is_said_before_anything_is_read() -> None:
    config = config_of(divergence={"policy": "switch_to_bf16"})
    assert resolve_precision(config, has_gpu=True)[0].training.precision == "fp16"
    with pytest.raises(UserError, match=r"switch_to_bf16 is for training\.precision: fp16, got fp32"):
        resolve_precision(config, has_gpu=False)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_gpu_without_bf16_is_named(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or is_native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    warning = bf16_warning(config_of("bf16"), GPU)
    assert ("only emulated on Tesla V100" in warning) is not is_native
    assert not bf16_warning(config_of("fp16"), GPU)
    assert not bf16_warning(config_of("bf16"), CPU)


class Node:
    """A task of Slurm with so many GPUs and ranks on its node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        self.has(given=8, sees=0, ranks=8)

    def has(self, given: int, sees: int, ranks: int, **variables: str) -> None:
        """`sees`: GPUs that torch finds."""
        variables |= {"SLURM_GPUS_ON_NODE": str(given), "LOCAL_WORLD_SIZE": str(ranks)}
        for name, value in variables.items():
            self._patch.setenv(name, value)
        self._patch.setattr(torch.cuda, "is_available", lambda: sees > 0)
        self._patch.setattr(torch.cuda, "device_count", lambda: sees)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


EIGHT = ",".join(map(str, range(8)))


@pytest.mark.parametrize(
    ("given", "sees", "ranks", "variables"),
    [
        (8, 0, 8, {}),
        (8, 0, 1, {"CUDA_VISIBLE_DEVICES": EIGHT}),
        (8, 7, 8, {"CUDA_VISIBLE_DEVICES": EIGHT}),
        (2, 1, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (2, 0, 2, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}),
        (2, 0, 2, {"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b"}),
    ],
)
def test_a_node_that_lacks_gpus_which_slurm_gave_is_a_fault_of_the_machine(
    node: Node, given: int, sees: int, ranks: int, variables: dict[str, str]
) -> None:
    node.has(given, sees, ranks, **variables)
    with pytest.raises(
        MachineError, match=f"Slurm gave this job {given} GPUs here, torch .* sees {sees}: .*nvidia-smi"
    ):
        has_gpus()


def test_a_run_ends_on_such_a_node_before_it_settles_on_a_precision_or_writes(
    node: Node, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match=r"slurm\.gpus_per_node: 0") as raised:
        train_rank(config_of(), run_dir, StopRequest(), Terminal())
    assert raised.value.exit_code == 1
    assert not run_dir.path.exists()


@pytest.mark.parametrize(
    ("given", "sees", "ranks", "variables"),
    [
        (8, 0, 8, {"CUDA_VISIBLE_DEVICES": ""}),
        (8, 0, 8, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (8, 0, 8, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
        (0, 0, 8, {}),
        (8, 8, 8, {"CUDA_VISIBLE_DEVICES": EIGHT}),
        (8, 4, 4, {}),
        (8, 1, 8, {"CUDA_VISIBLE_DEVICES": "0"}),
        (8, 2, 4, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (2, 1, 2, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}),
    ],
)
def test_gpus_that_were_hidden_or_are_not_needed_are_not_missed(
    node: Node, given: int, sees: int, ranks: int, variables: dict[str, str]
) -> None:
    node.has(given, sees, ranks, **variables)
    assert has_gpus() is (sees > 0)


def test_a_torch_for_cpus_trains_on_the_cpus_of_a_node_with_gpus(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not has_gpus()


def test_a_rank_without_a_gpu_of_its_own_is_told_how_ranks_and_gpus_belong_together(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.has(8, 1, 8, RANK="3", LOCAL_RANK="3", WORLD_SIZE="8")
    with pytest.raises(UserError, match=r"rank 3 is number 3 on its node, which shows it 1 GPUs: .*MIG") as raised:
        group.join(60)
    assert raised.type is UserError


def test_a_gpu_that_cannot_be_used_is_a_fault_of_the_machine(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported at another call")

    node.has(2, 2, 2, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    monkeypatch.setattr(torch.cuda, "set_device", is_full)
    with pytest.raises(
        MachineError, match=r"GPU 1 cannot be used \(CUDA error: out of memory\): another process .*nvidia-smi"
    ):
        group.join(60)


def test_products_in_fp32_are_not_rounded_to_tf32() -> None:
    """docs/training.md promises it: torch's own setting, which neither DeepSpeed nor anything here changes."""
    import dist_transformer.training.engine.engine  # noqa: F401

    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
