"""Divergence: how it is noticed, and how a run goes on after it."""


class Diverged(Exception):
    """Training diverged; every rank raises it at the same step.

    Attributes:
        reason: what was seen, for people.
        since_step: the step at which it began: only checkpoints of earlier steps are good.
    """

    def __init__(self, reason: str, since_step: int) -> None:
        self.reason, self.since_step = reason, since_step
        super().__init__(reason)
