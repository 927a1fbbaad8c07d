"""A look at a corpus before there is a configuration: its size, lengths and scripts, and pairs to hold out of training.

Pairs are sampled by a hash of the source sentence: equal sentences are in the sample together or not at all, so that it
shows repetitions, and pairs that are held out are not in what remains.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources.corpus import TABLE_BATCH_ROWS, read_corpus

SAMPLE_PAIRS, SCRIPT_SENTENCES = 10_000, 1000
CHARACTERS_A_TOKEN = {"Cjk": 1.6, "Hiragana": 1.6, "Katakana": 1.6, "Hangul": 2.0, "Thai": 2.5}
"""Assumed; of others 4: the German of Multi30k has 4.5 with 6,000 pieces, that of Tatoeba 3.9 with 8,000."""
Pair = tuple[str, str]
Progress = Callable[[int], None]
"""Takes the number of pairs read."""


@dataclass(frozen=True)
class Side:
    """One side of the sample: the script of most letters (Unicode's name), and lengths in estimated tokens."""

    script: str
    mean: float
    median: int
    percentile_99: int


@dataclass(frozen=True)
class Survey:
    """Figures of a corpus; `repeated` is the share of pairs whose source sentence came before, by the sample.

    `sample`: pairs of different source sentences, in an order by chance, without blank ones.
    """

    pairs: int
    characters: int
    repeated: float
    sides: list[Side]
    sample: list[Pair]


def survey(corpus: CorpusConfig, data: DataConfig, progress: Progress) -> Survey:
    """Reads a corpus. Raises the errors of `read_corpus`."""
    pairs, rate, characters, times = 0, 1, set[str](), Counter[int]()
    sample: dict[int, Pair] = {}
    for source, target in _pairs(corpus, data, progress):
        pairs += 1
        characters.update(source, target)
        if (key := _hash(source)) % rate == 0 and source.strip() and target.strip():
            times[key] += 1
            sample.setdefault(key, (source, target))
            if len(sample) > SAMPLE_PAIRS:
                rate *= 2
                sample = {kept: pair for kept, pair in sample.items() if kept % rate == 0}
    repeated = 1 - len(sample) / max(1, sum(times[key] for key in sample))
    kept = [pair for _, pair in sorted(sample.items())]
    return Survey(pairs, len(characters), repeated, [_side([pair[at] for pair in kept]) for at in (0, 1)], kept)


def write_splits(
    corpus: CorpusConfig, data: DataConfig, held_out: Mapping[str, Sequence[Pair]], folder: Path, progress: Progress
) -> None:
    """Writes each list of pairs as files NAME.<language>, and all pairs that share no sentence with them as train.

    Line ends within cells of a table become spaces.
    """
    taken = [{_hash(pair[at]) for pairs in held_out.values() for pair in pairs} for at in (0, 1)]
    read = _pairs(corpus, data, progress)
    rest = (pair for pair in read if not any(_hash(text) in taken[at] for at, text in enumerate(pair)))
    for name, pairs in {**held_out, "train": rest}.items():
        paths = [folder / f"{name}.{language}" for language in (data.source_language, data.target_language)]
        with paths[0].open("w", encoding="utf-8") as source, paths[1].open("w", encoding="utf-8") as target:
            for pair in pairs:
                source.write(pair[0].replace("\n", " ") + "\n")
                target.write(pair[1].replace("\n", " ") + "\n")


def _pairs(corpus: CorpusConfig, data: DataConfig, progress: Progress) -> Iterator[Pair]:
    for batch in read_corpus(corpus, data, TABLE_BATCH_ROWS):
        yield from ((source or "", target or "") for source, target in zip(batch.source, batch.target, strict=True))
        progress(batch.first_row + len(batch.source))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _side(texts: Sequence[str]) -> Side:
    letters = (letter for text in texts[:SCRIPT_SENTENCES] for letter in text if letter.isalpha())
    scripts = Counter(unicodedata.name(letter, "unknown").partition(" ")[0].capitalize() for letter in letters)
    script = max(scripts, key=lambda name: scripts[name], default="none")
    lengths = sorted(len(text) / CHARACTERS_A_TOKEN.get(script, 4) + 1 for text in texts) or [1.0]
    median, percentile_99 = (round(lengths[len(lengths) * share // 100]) for share in (50, 99))
    return Side(script, sum(lengths) / len(lengths), median, percentile_99)
