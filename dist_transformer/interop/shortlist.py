"""The shortlist of a model for CTranslate2 (docs/interop.md): a vocabulary map, vmap.txt, made from a lexicon of tokens.

A line is a source token, a tab, and target tokens; that of no source token has those of every translation. With 500 frequent
tokens more translations are as without, BLEU is the same (benchmarks/results/2026-11-25-shortlist.md).
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources.corpus import read_pairs
from dist_transformer.data.token_aligner import Lexicon, train_aligner
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import DataError, UserError, say
from dist_transformer.interop.model_folder import LoadedModel, is_model_folder, read_config, tokenizer_files

VOCABULARY_MAP = "vmap.txt"
FREQUENT, BEST = 100, 100
MOST_PAIRS = 300_000
"""Pairs of texts that are read: more than the aligner takes, unless they are very short."""


def read_lexicon(paths: Sequence[Path], loaded: LoadedModel) -> Lexicon:
    """Returns the lexicon in a file of guided alignment, or of a source and a target text; UserError: not this model's."""
    rows, targets = loaded.information.source_vocabulary, loaded.information.target_vocabulary
    if len(paths) == 2:
        corpus = CorpusConfig(source=str(paths[0].absolute()), target=str(paths[1].absolute()))
        source, target = read_pairs(corpus, DataConfig(train=corpus), MOST_PAIRS)
        tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
        ids = zip(tokenizer.encode_source(source), tokenizer.encode_target(target), strict=True)
        say(f"source text: {paths[0]}, target text: {paths[1]}")
        return train_aligner(((np.array(s), np.array(t)) for s, t in ids), targets)
    problem = f"not there, or no lexicon of a tokenizer with {targets} target tokens"
    with suppress(DataError):
        lexicon = Lexicon.load(paths[0])
        if len(paths) == 1 and len(lexicon.shares) == targets and not (lexicon.keys >= rows * targets).any():
            if not is_model_folder(of := paths[0].parent / "model"):
                return lexicon
            here, there = ((a.source_language, a.target_language) for a in (loaded.information, read_config(of)[1]))
            is_reverse = here == there[::-1] != there
            if not is_reverse and tokenizer_files(of).read() == loaded.tokenizer_files.read():
                return lexicon
            problem = f"is of {of}, which has {'the other direction' if is_reverse else 'another tokenizer'}"
    raise UserError(
        f"--shortlist {' '.join(map(str, paths))}: {problem}. "
        "Expected lexicon.npz of a run of this model with training.guided_alignment; or give it twice: a source and a target text"
    )


def vocabulary_map(lexicon: Lexicon, sources: Sequence[str], targets: Sequence[str], *, most: int = FREQUENT) -> str:
    """Returns the text of the file, with the `most` frequent tokens; tokens are the names of the rows of both embeddings."""
    of_source, of_target = np.divmod(lexicon.keys, max(1, len(targets)))
    starts, are_targets = np.searchsorted(of_source, np.arange(len(sources) + 1)), {*targets}
    frequent = np.argsort(-lexicon.shares, kind="stable")[:most]
    lines = {"": [targets[n] for n in frequent[lexicon.shares[frequent] > 0]]}
    for source, first, last in zip(sources, starts[:-1], starts[1:], strict=True):
        best = np.argsort(-lexicon.probabilities[first:last], kind="stable")[:BEST]
        same = [source] if source in are_targets else []
        lines[source] = [*dict.fromkeys([targets[n] for n in of_target[first:last][best]] + same)]
    spaced = {token for token in {*sources, *targets} if "".join(token.split()) != token}  # the file cannot hold them
    written = ((source, " ".join(each for each in of_it if each not in spaced)) for source, of_it in lines.items())
    return "".join(f"{source}\t{of_it}\n" for source, of_it in written if source not in spaced)
