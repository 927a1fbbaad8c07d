"""torch's counter of FLOPs, taught the product that it does not know."""

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _added_product})


def _added_product(_total: list[int], left: list[int], right: list[int], *_: object, **__: object) -> int:
    return 2 * left[0] * left[1] * right[1]
