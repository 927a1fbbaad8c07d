"""Dist Transformer: trains the encoder-decoder Transformer of Vaswani et al. (2017) on Slurm clusters.

From Python: docs/api.md. The names below are imported when they are first asked for, as torch takes seconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_transformer.api import (
        Config,
        MachineError,
        Run,
        Translator,
        UserError,
        evaluate,
        load_config,
        prepare,
        submit,
        train,
    )

try:
    from dist_transformer._version import __version__ as __version__  # written when it is built or installed
except ModuleNotFoundError:
    __version__ = "0+checkout"

__all__ = [
    "Config", "MachineError", "Run", "Translator", "UserError",
    "evaluate", "load_config", "prepare", "submit", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dist_transformer import api

    return getattr(api, name)
