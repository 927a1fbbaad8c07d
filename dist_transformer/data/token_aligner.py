"""Alignment of the tokens of pairs by the model of fast_align (Dyer, Chahuneau and Smith, 2013): IBM model 2 with a prior
for the diagonal.

    p(target token j) = NULL_SHARE * share of it in the text
                      + (1 - NULL_SHARE) * sum over source positions i of prior(i | j) * p(target token | source token i)

`train_aligner` finds the probabilities of target tokens given source tokens by expectation maximisation. The ends of
sentence are tokens as others.

Axes: N cells, a source position beside a target position of its pair; K pairs of a source and a target token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dist_transformer.errors import DataError
from dist_transformer.files import replacing

NULL_SHARE = 0.08
"""Probability that a target token has no source token."""
TENSION = 4.0
"""How fast the prior falls with the distance from the diagonal, both positions being shares of their sentence."""
ROUNDS = 5
MOST_CELLS = 20_000_000
"""Of the pairs that are read: those of 50,000 pairs of 20 tokens."""
SMALLEST = 1e-3
"""Smaller probabilities are left out at the end."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Pair = tuple[Ints, Ints]
"""Source and target token ids of a sentence pair."""


@dataclass(frozen=True)
class Lexicon:
    """Probabilities of target tokens given a source token.

    Attributes:
        keys: source id * number of target ids + target id, ascending (K).
        probabilities: of the target token given the source token (K).
        shares: of each target token in the text, for tokens that have no source (V).
    """

    keys: Ints
    probabilities: Floats
    shares: Floats

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, keys=self.keys, probabilities=self.probabilities, shares=self.shares)

    @classmethod
    def load(cls, path: Path) -> "Lexicon":
        """Reads a file; DataError if it is damaged."""
        try:
            with np.load(path) as arrays:
                return cls(arrays["keys"], arrays["probabilities"], arrays["shares"])
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(f"{path}: no lexicon can be read ({error}); delete it, it is made again") from error


def train_aligner(pairs: Iterable[Pair], num_target: int) -> Lexicon:
    """Estimates the lexicon of `num_target` target ids from the first pairs, up to `MOST_CELLS`."""
    keys_N, target_J, sizes_J, prior_N = _cells(pairs, num_target)
    shares = np.bincount(target_J, minlength=num_target) / max(1, len(target_J))
    keys, index_N = np.unique(keys_N, return_inverse=True)
    del keys_N
    index_N = index_N.astype(np.int32)
    starts_J = np.cumsum(sizes_J) - sizes_J
    of_no_source_J = NULL_SHARE * shares[target_J]
    probabilities = np.full(len(keys), 1.0 / max(1, num_target))
    sources = keys // num_target
    for _ in range(ROUNDS if len(keys) else 0):
        joint_N = prior_N * probabilities[index_N]
        total_J = np.add.reduceat(joint_N, starts_J) + of_no_source_J
        joint_N /= np.repeat(total_J, sizes_J)
        counts = np.bincount(index_N, joint_N, len(keys))
        probabilities = counts / np.maximum(np.bincount(sources, counts)[sources], 1e-30)
    is_kept = probabilities >= SMALLEST
    return Lexicon(keys[is_kept], probabilities[is_kept].astype(np.float32), shares.astype(np.float32))


def _cells(pairs: Iterable[Pair], num_target: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Returns the keys of all cells, the target tokens with the number of cells of each, and (1 - NULL_SHARE) * prior."""
    keys, targets, sizes = ([np.empty(0, np.int64)] for _ in range(3))
    priors, num_cells = [np.empty(0, np.float32)], 0
    for source, target in pairs:
        num_cells += len(source) * len(target)
        if num_cells > MOST_CELLS:
            break
        keys.append((source[None, :] * num_target + target[:, None]).ravel())
        targets.append(target)
        sizes.append(np.full(len(target), len(source)))
        places_S, places_T = ((np.arange(len(side)) + 0.5) / len(side) for side in (source, target))
        prior_TS = np.exp(-TENSION * np.abs(places_S[None, :] - places_T[:, None]))
        priors.append(((1 - NULL_SHARE) * prior_TS / prior_TS.sum(1, keepdims=True)).astype(np.float32).ravel())
    return np.concatenate(keys), np.concatenate(targets), np.concatenate(sizes), np.concatenate(priors)
