"""DeepSpeed's configuration, made of ours: there is no second file to disagree with."""

from typing import Any

from torch import nn

from dist_transformer.config.model_size import REDUCED_AT_ONCE
from dist_transformer.config.schema import TrainingConfig
from dist_transformer.distributed.group import Ranks


def deepspeed_config(
    training: TrainingConfig, ranks: Ranks, module: nn.Module, initial_scale: int, scale_window: int
) -> dict[str, Any]:
    """Returns the configuration. `initial_scale`, `scale_window`: of fp16's loss scale, a power of 2, and in steps."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    offloaded = {"none": (), "optimizer": ("optimizer",), "optimizer_and_parameters": ("optimizer", "param")}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only counts with it; our micro-batches are sized in tokens
        "gradient_clipping": training.gradient_clip_norm,
        "zero_optimization": {
            "stage": training.zero_stage,
            "overlap_comm": False,
            # With DeepSpeed's default of 500 million, a buffer would be 2 GB for any model.
            "reduce_bucket_size": max(*sizes, min(sum(sizes), REDUCED_AT_ONCE)),
            # Page-locked memory is only useful for copies to and from a GPU.
            **{
                f"offload_{part}": {"device": "cpu", "pin_memory": ranks.device.type == "cuda"}
                for part in offloaded[training.offload]
            },
        },
        "managed_gradient_accumulation": False,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**12,
        "timers": {"throughput": {"enabled": False}},  # it synchronises with the device at each pass and step
    }
    if training.communication_dtype != "auto":
        config["communication_data_type"] = training.communication_dtype
    if training.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": initial_scale.bit_length() - 1,
            "loss_scale_window": scale_window,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    return config
