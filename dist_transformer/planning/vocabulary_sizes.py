"""How many pieces a run will have, before anything is prepared: tokenizers that are given are looked into."""

import functools
from pathlib import Path

from dist_transformer.config.schema import Config
from dist_transformer.planning.vocabularies import with_vocabularies


def with_counted_pieces(config: Config) -> Config:
    """With the pieces of `tokenizer.source_model` and `target_model`, for a plan and its counts.

    Where they are not given, or gone, as a run folder may outlive them, `tokenizer.vocabulary_size` counts.
    Raises DataError: a file is no sentencepiece model.
    """
    source, target = config.tokenizer.source_model, config.tokenizer.target_model
    if source is None or not all(Path(path).exists() for path in (source, target) if path):
        return config
    return with_vocabularies(config, *_sizes(Path(source), Path(target) if target else None))


@functools.cache  # the points of a sweep have one tokenizer
def _sizes(source: Path, target: Path | None) -> tuple[int, int]:
    from dist_transformer.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source, target)
    return tokenizer.source_vocabulary, tokenizer.target_vocabulary
