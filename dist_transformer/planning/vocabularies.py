"""How many pieces and parameters a run will have: what `config check` and `submit` ask, so nothing heavy is imported."""

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.model_size import parameter_count
from dist_transformer.config.schema import Config


class CountedTokenizer(TokenizerConfig):
    """A tokenizer whose pieces are known: they are in files already."""

    source_vocabulary: int
    target_vocabulary: int


def with_vocabularies(config: Config, source: int, target: int) -> Config:
    """`config` to plan with, with so many pieces of each side."""
    sizes = {"source_vocabulary": source, "target_vocabulary": target}
    counted = CountedTokenizer.model_construct(**{**dict(config.tokenizer), **sizes})
    return config.model_copy(update={"tokenizer": counted})


def vocabulary_sizes(config: Config) -> tuple[int, int]:
    """Pieces of the source and of the target: as `with_vocabularies` has them, else as `prepare` makes them."""
    tokenizer = config.tokenizer
    if isinstance(tokenizer, CountedTokenizer):
        return tokenizer.source_vocabulary, tokenizer.target_vocabulary
    size = -(-tokenizer.vocabulary_size // 8) * 8
    return size, size


def count_parameters(config: Config) -> int:
    return parameter_count(config.model, *vocabulary_sizes(config))
