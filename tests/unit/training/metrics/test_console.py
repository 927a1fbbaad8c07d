"""The estimates that a start logs before its first step."""

import logging

import pytest
from rows_helpers import manifest_of, split_of

from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import RowGroup, Shard
from dist_transformer.training.metrics.console import log_estimate


def test_a_corpus_whose_tokens_are_estimated_as_none_is_a_step_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """With data.on_the_fly the tokens of each row group are estimated by themselves, and rounded."""
    groups = (RowGroup(1, 0, 0),) * 9
    manifest = manifest_of({"train": split_of([Shard("text.parquet", 1, "", groups)])})
    config = Config(data={"train": {"demo": "train"}, "max_tokens": 64})
    with caplog.at_level(logging.INFO):
        log_estimate(config, config.training, manifest, 1)
    assert "about 1 source + 1 target tokens a step, 1 steps an epoch" in caplog.text
