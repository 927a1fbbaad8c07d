"""The precision of a run: what `auto` is where, and what a machine refuses or warns of."""

from typing import Any

import pytest
import torch

from dist_transformer.config.schema import Config
from dist_transformer.errors import UserError
from dist_transformer.training.precision import FP16_ON_CPU, bf16_warning, resolve_precision

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
    assert raised.value.is_agreed


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


def test_products_in_fp32_are_not_rounded_to_tf32() -> None:
    """docs/training.md promises it: torch's own setting, which neither DeepSpeed nor anything here changes."""
    import dist_transformer.training.engine.engine  # noqa: F401

    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
