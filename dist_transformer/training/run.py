"""One start of a run, as passed to its parts within a rank."""

from collections.abc import Callable
from dataclasses import dataclass

from dist_transformer.config.schema import Config, TrainingConfig
from dist_transformer.distributed.group import Ranks
from dist_transformer.processes.stop_request import StopRequest
from dist_transformer.run.folder import RunDir
from dist_transformer.training.divergence import Recovery
from dist_transformer.training.engine.schedule import learning_rate
from dist_transformer.training.metrics.console import Terminal
from dist_transformer.training.run_data import RunData
from dist_transformer.training.watchdog import Watchdog


@dataclass(frozen=True)
class Run:
    """One start of a run within this process.

    Attributes:
        config: the configuration as recorded in the run folder, "auto" replaced by the values found.
        training: `config.training` as this start computes: after a divergence perhaps in bf16; a single rank in ZeRO 0.
    """

    config: Config
    training: TrainingConfig
    run_dir: RunDir
    ranks: Ranks
    data: RunData
    stop: StopRequest
    run_id: str
    recovery: Recovery
    watchdog: Watchdog
    terminal: Terminal

    def wants_stop(self) -> bool:
        """True if this rank was asked to stop."""
        return self.stop.reason() is not None

    def doing(self, what: str) -> Callable[[], None]:
        """Returns a function that reports progress in `what` to the watchdog."""
        return lambda: self.watchdog.progress(what)

    def learning_rate(self, step: int) -> float:
        """Learning rate of update number `step`, counted from 1."""
        return self.recovery.learning_rate_factor * learning_rate(self.config, step)
