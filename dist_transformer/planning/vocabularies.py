"""Numbers of pieces and parameters of a run, for `config check` and `submit`, before anything is prepared."""

import functools
from pathlib import Path

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.model_size import Parameters, count_by_part
from dist_transformer.config.schema import Config


class CountedTokenizer(TokenizerConfig):
    """A tokenizer whose numbers of pieces are known, because its files exist."""

    source_vocabulary: int
    target_vocabulary: int


def with_vocabularies(config: Config, source: int, target: int) -> Config:
    """Configuration for planning with so many pieces on each side."""
    sizes = {"source_vocabulary": source, "target_vocabulary": target}
    counted = CountedTokenizer.model_construct(**{**dict(config.tokenizer), **sizes})
    return config.model_copy(update={"tokenizer": counted})


def with_counted_pieces(config: Config) -> Config:
    """Configuration for planning with the pieces counted in `tokenizer.source_model` and `target_model`.

    If they are not given, or were removed after the run began, `tokenizer.vocabulary_size` is used.
    Raises DataError: a file is no sentencepiece model.
    """
    source, target = config.tokenizer.source_model, config.tokenizer.target_model
    if source is None or not all(Path(path).exists() for path in (source, target) if path):
        return config
    return with_vocabularies(config, *_sizes(Path(source), Path(target) if target else None))


@functools.cache
def _sizes(source: Path, target: Path | None) -> tuple[int, int]:
    from dist_transformer.data.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source, target)
    return tokenizer.source_vocabulary, tokenizer.target_vocabulary


def vocabulary_sizes(config: Config) -> tuple[int, int]:
    """Numbers of source and target pieces: those set by `with_vocabularies`, else those that `prepare` makes."""
    tokenizer = config.tokenizer
    if isinstance(tokenizer, CountedTokenizer):
        return tokenizer.source_vocabulary, tokenizer.target_vocabulary
    size = -(-tokenizer.vocabulary_size // 8) * 8
    return size, size


def count_parameters(config: Config) -> int:
    """Number of parameters."""
    return parameters_by_part(config).total


def parameters_by_part(config: Config) -> Parameters:
    """Numbers of parameters of layers, and of all others."""
    return count_by_part(config.model, *vocabulary_sizes(config))
