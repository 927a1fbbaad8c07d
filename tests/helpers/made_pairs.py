"""Pairs of token ids whose alignment is known."""

import numpy as np

from dist_transformer.data.token_aligner import Pair

WORDS = 60
END = 2


def made_pairs(count: int, seed: int) -> list[tuple[Pair, list[int]]]:
    """Pairs whose target has a word for each source word, some neighbours swapped and some words without a source; with
    the source position of each target position (-1: none)."""
    drawn = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        source = drawn.integers(10, 10 + WORDS, drawn.integers(3, 15))
        order = list(range(len(source)))
        for place in range(0, len(order) - 1, 2):
            if drawn.random() < 0.4:
                order[place : place + 2] = order[place + 1], order[place]
        truth, target = [], []
        for position in order:
            if drawn.random() < 0.1:
                truth.append(-1)
                target.append(5)
            truth.append(position)
            target.append(int(source[position]) + 100)
        pair = np.array([*source, END]), np.array([*target, END])
        made.append((pair, [*truth, len(source)]))
    return made
