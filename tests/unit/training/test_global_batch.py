"""The feed says how long training stood still for a batch."""

from collections import Counter
from types import SimpleNamespace

from dist_transformer.data.loader.loader import LocalStep
from dist_transformer.training import global_batch
from dist_transformer.training.global_batch import GlobalBatchPrefetcher, RankStatus

SLOW_SECONDS = 0.5


class SlowLoader:
    """A loader that takes its time, which it tells itself, and has nothing."""

    now = 0.0
    partition = SimpleNamespace(epoch=0, open_windows=((),))

    def must_repartition(self, batch: int) -> bool:
        return False

    def next_step(self) -> LocalStep:
        self.now += SLOW_SECONDS
        return LocalStep([None], Counter(), ())

    def lane_positions(self) -> dict[int, tuple[int, int]]:
        return {0: (0, 0)}


def test_the_start_is_no_wait_for_data_and_a_slow_loader_is(ranks, monkeypatch):
    loader = SlowLoader()
    monkeypatch.setattr(global_batch, "time", SimpleNamespace(monotonic=lambda: loader.now))
    prefetcher = GlobalBatchPrefetcher(loader, ranks, ("train",), 1, 0)
    prefetcher.prefetch(RankStatus(False, False, 0.0))
    before_training = prefetcher.next()
    prefetcher.prefetch(RankStatus(False, False, 0.0))
    in_training = prefetcher.next()
    assert (before_training.wait_seconds, in_training.wait_seconds) == (0.0, SLOW_SECONDS)
