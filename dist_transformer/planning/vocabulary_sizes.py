"""Numbers of pieces of a run before anything is prepared: given tokenizers are read."""

import functools
from pathlib import Path

from dist_transformer.config.schema import Config
from dist_transformer.planning.vocabularies import with_vocabularies


def with_counted_pieces(config: Config) -> Config:
    """Configuration for planning with the pieces counted in `tokenizer.source_model` and `target_model`.

    If they are not given, or were removed after the run began, `tokenizer.vocabulary_size` is used.
    Raises DataError: a file is no sentencepiece model.
    """
    source, target = config.tokenizer.source_model, config.tokenizer.target_model
    if source is None or not all(Path(path).exists() for path in (source, target) if path):
        return config
    return with_vocabularies(config, *_sizes(Path(source), Path(target) if target else None))


@functools.cache  # the points of a sweep share a tokenizer
def _sizes(source: Path, target: Path | None) -> tuple[int, int]:
    from dist_transformer.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source, target)
    return tokenizer.source_vocabulary, tokenizer.target_vocabulary
