"""Every value of every choice in the schema of the model: a new one is tested as soon as it stands there."""

import typing
from typing import Any

from dist_transformer.config.schema import ModelConfig

NAMES = ("norm", "norm_type", "activation", "positions")
CHOICES: list[dict[str, Any]] = [
    {name: value, **({"max_positions": 96} if value == "learned" else {})}
    for name in NAMES
    for value in typing.get_args(ModelConfig.model_fields[name].annotation)
]
