"""The precision of a run, resolved by each rank before anything else: the value of `auto`, limits of the machine."""

import os

import torch

from dist_transformer.config.checks import cross_problems
from dist_transformer.config.model_size import automatic_precision, with_precision
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError, UserError

FP16_ON_CPU = "DIST_TRANSFORMER_FP16_ON_CPU"
"""Variable by which tests allow fp16 on a CPU: steps are the same there, except for time and the rounding of norms."""


def resolve_precision(config: Config, has_gpu: bool) -> tuple[Config, str]:
    """Replaces the precision `auto` in the configuration, and returns a message for the log too; "" if it was given.
    Raises UserError: this machine cannot train in that precision, or another setting forbids it."""
    said = ""
    if config.training.precision == "auto":
        config = with_precision(config, automatic_precision(has_gpu))
        said = f"{config.training.precision}, what training.precision: auto is on {'GPUs' if has_gpu else 'CPUs'}"
    if problems := cross_problems({"training": config.training, "divergence": config.divergence}):
        raise ConfigError(problems)
    if config.training.precision == "fp16" and not has_gpu and not os.environ.get(FP16_ON_CPU):
        raise UserError(
            "training.precision: expected fp32 or bf16, since torch finds no GPU on this machine, got fp16: CPUs compute it "
            "many times slower than fp32, and norms of gradients wrong by per cents. With training.precision=fp32 the run "
            "starts here, or resumes from its checkpoints: their weights are fp32"
        )
    return config, said


def bf16_warning(config: Config, device: torch.device) -> str:
    """Returns a message for the log if the run is in bf16 on a GPU without bf16 arithmetic, else ""."""
    is_on_gpu = config.training.precision == "bf16" and device.type == "cuda"
    if not is_on_gpu or torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return (
        f"bf16 is only emulated on {torch.cuda.get_device_name(device)}: training.precision=fp16 is faster there, and fp32 "
        "more exact"
    )
