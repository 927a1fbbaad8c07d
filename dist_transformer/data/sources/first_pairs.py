"""Check of the first pairs of local training corpora before a job is submitted: finds problems that prepare would
otherwise report after hours in the queue.
"""

from collections import Counter
from itertools import islice
from pathlib import Path

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.paths import is_address, located
from dist_transformer.config.schema import Config
from dist_transformer.errors import DataError

ROWS, MOST_ROWS = 2000, 100_000
"""Pairs that are looked at of a training corpus, more of one that drops them all, or whose sides must have as many lines."""


def first_pairs_problems(config: Config) -> list[str]:
    """Returns a problem for each corpus that cannot be read, or whose first pairs the filters all drop."""
    data = config.data
    if data.prepared is not None and (Path(data.prepared) / "manifest.json").is_file():
        return []
    found = [_problem(corpus, config, ROWS) for corpus in data.training_corpora().values()]
    found += [_problem(corpus, config, MOST_ROWS) for corpus in data.held_out_corpora().values()]
    return [problem for problem in found if problem is not None]


def _problem(corpus: CorpusConfig, config: Config, rows: int) -> str | None:
    name = corpus.path or corpus.source
    if not name or is_address(located(config.data.root, name)):
        return None
    # Imported here: numpy and pyarrow take longer than the rest of `submit`.
    from dist_transformer.data.filters import Cleaner
    from dist_transformer.data.sources.corpus import read_corpus
    from dist_transformer.data.sources.files import corpus_name

    # Without the plug-in, whose code is not run here, and rules that load a model or read the held-out corpora.
    filters = config.data.filters_of(corpus).without_rules().model_copy(update={"plugin": None})
    cleaner, dropped = Cleaner(filters, config.data.languages_of(corpus)), Counter[str]()
    try:
        for batch in islice(read_corpus(corpus, config.data, rows), MOST_ROWS // rows):
            if rows != ROWS:
                return None
            text, looked_at = cleaner.clean(batch), batch.first_row + len(batch.source)
            dropped += text.counts()
            if config.tokenizer.source_model is None:  # ours have at least one token per word, and the end of sentence
                words = [max(map(len, map(str.split, pair))) for pair in zip(text.source, text.target, strict=True)]
                dropped["too_long"] += sum(count >= filters.max_tokens for count in words)
            if dropped.total() < looked_at:
                return None
    except DataError as error:
        return str(error)
    counts = ", ".join(f"{rule} {count}" for rule, count in dropped.items() if count)
    return (
        f"data.filters: all of the first {looked_at} pairs of {corpus_name(corpus, config.data)} would be dropped "
        f"({counts}); look at the text, the order of its columns and data.filters"
    )
