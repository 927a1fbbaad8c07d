"""Rules by which pairs are dropped. A pair is counted once, by the first rule that it breaks."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.tokenizer.tokenizer import CHARACTERS_A_TOKEN
from dist_transformer.plugins import KeepPair, Plugin, call, find

RULES = ("bad_encoding", "empty", "identical", "plugin", "too_long", "length_ratio")
LENGTH_RULES = RULES[4:]
"""Rules that need the tokens."""
RATIO_FREE_TOKENS = 10
"""Length of the longer side below which pairs pass the length ratio: `Yes.` may have a long translation."""


def filter_text(batch: RawBatch, settings: FilterConfig) -> tuple[list[int], Counter[str]]:
    """Returns the positions of the pairs to keep by their text, and the numbers of dropped ones by rule."""
    most = CHARACTERS_A_TOKEN * settings.max_tokens
    kept: list[int] = []
    dropped: Counter[str] = Counter()
    for position, (source, target) in enumerate(zip(batch.source, batch.target, strict=True)):
        if position in batch.bad_encoding:
            dropped["bad_encoding"] += 1
        elif not (source and target and source.strip() and target.strip()):
            dropped["empty"] += 1
        elif settings.drop_identical and source.removeprefix(batch.prefix).strip() == target.strip():
            dropped["identical"] += 1
        elif max(len(source), len(target)) > most:
            dropped["too_long"] += 1
        else:
            kept.append(position)
    if settings.plugin is not None:
        plugin, keep = _plugin(settings.plugin)
        pairs = [((batch.source[n] or "").removeprefix(batch.prefix), batch.target[n] or "") for n in kept]
        is_kept = call(plugin, lambda: [bool(keep(*pair)) for pair in pairs])
        if count := is_kept.count(False):
            dropped["plugin"] += count
        kept = list(compress(kept, is_kept))
    return kept, dropped


@cache
def _plugin(given: str) -> tuple[Plugin, KeepPair]:
    """Loads the user's rule, once in a process."""
    plugin = find("data.filters.plugin", given)
    return plugin, plugin.load()


def filter_lengths(
    source_tokens: Sequence[int] | NDArray[np.int64],
    target_tokens: Sequence[int] | NDArray[np.int64],
    settings: FilterConfig,
) -> tuple[NDArray[np.bool_], Counter[str]]:
    """Returns a mask of the pairs to keep by their lengths in tokens (end of sentence included), and the numbers of
    dropped ones by rule.

    A side of one token is only the end of sentence: the tokenizer's normalization has removed its characters.
    """
    source, target = np.asarray(source_tokens, dtype=np.int64), np.asarray(target_tokens, dtype=np.int64)
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    kept = np.ones(len(source), dtype=np.bool_)
    dropped: Counter[str] = Counter()
    broken_by_rule = {
        "empty": shorter < 2,
        "too_long": longer > settings.max_tokens,
        "length_ratio": (longer >= RATIO_FREE_TOKENS) & (longer > settings.max_length_ratio * shorter),
    }
    for rule, broken in broken_by_rule.items():
        if count := int(np.count_nonzero(kept & broken)):
            dropped[rule] += count
        kept &= ~broken
    return kept, dropped
