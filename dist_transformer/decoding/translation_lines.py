"""Output formats of translations: plain lines, n-best lists as in Moses and Marian, word alignment, JSON.

Axes: L layers, H heads, S source pieces, T target pieces, both with the end of sentence last.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from pathlib import Path

import torch
from torch import Tensor

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.loaded_model import Search
from dist_transformer.decoding.translate import Translation, translate_lines
from dist_transformer.model.search_interface import Engine
from dist_transformer.model.transformer import Transformer


@dataclass(frozen=True)
class Task:
    """Settings of `translate`, independent of the source of the lines.

    Attributes:
        models: model folders or run folders; several are an ensemble.
        prefix: a file with the beginning of each line's translations; None: not prescribed.
        alignment: write pairs of words, too.
        as_json: write one object per line, with everything.
        plugin: as for `load_model_folder`.
        mbr: choose one of the n best by `most_alike`.
    """

    models: Sequence[Path]
    settings: DecodingConfig
    engine: Engine
    prefix: Path | None = None
    alignment: bool = False
    as_json: bool = False
    plugin: str | None = None
    mbr: bool = False


def translated(
    task: Task,
    search: Search,
    lines: Iterable[str],
    prefixes: Iterable[str] | None,
    num_before: int = 0,
    progress: Callable[[int], None] = lambda lines: None,
) -> Iterator[str]:
    """Yields the output of each line; the arguments are those of `translate_lines`."""
    lines, waiting = tee(lines)  # translations are yielded a chunk of lines later
    given = translate_lines(search.searcher, search.tokenizer, lines, task.settings, prefixes, num_before, progress)
    for number, (translations, line) in enumerate(zip(given, waiting, strict=True), start=num_before):
        yield written(task, search, number, line, translations)


def written(task: Task, search: Search, number: int, line: str, translations: Sequence[Translation]) -> str:
    """Output for the translations of a line, numbered from 0: one line of text, or one for each of the n best."""
    if task.mbr:
        translations = [most_alike(translations)]
    if task.as_json:
        return _json(task, search, line, translations)
    if task.mbr or task.settings.n_best == 1:
        return " ||| ".join([translations[0].text, *_alignment(task, search, line, translations[0])])
    lines = []
    for each in translations:
        scores = [f"log_probability= {each.log_probability:.4f}", f"{each.score:.4f}"]
        lines.append(" ||| ".join([str(number), each.text, *scores, *_alignment(task, search, line, each)]))
    return "\n".join(lines)


def most_alike(translations: Sequence[Translation]) -> Translation:
    """Returns the translation with the highest mean chrF against the others, of equals the first: minimum Bayes risk."""
    from fastchrf import pairwise_chrf  # an extra

    texts = [translation.text for translation in translations]
    (scores,) = pairwise_chrf([texts], [texts])
    sums = [sum(row) - row[number] for number, row in enumerate(scores)]
    return translations[sums.index(max(sums))]


def _alignment(task: Task, search: Search, line: str, translation: Translation) -> list[str]:
    if not task.alignment:
        return []
    links = word_alignment(search.models[0], search.tokenizer, line, translation)
    return [" ".join(f"{source}-{target}" for source, target in links)]


def _json(task: Task, search: Search, line: str, translations: Sequence[Translation]) -> str:
    records = []
    for translation in translations:
        record = asdict(translation) | {"pieces": search.tokenizer.target_pieces(translation.tokens)}
        if task.alignment:
            record["alignment"] = word_alignment(search.models[0], search.tokenizer, line, translation)
        records.append(record)
    return json.dumps({"source": line, "translations": records}, ensure_ascii=False)


@torch.no_grad()
def word_alignment(
    model: Transformer, tokenizer: Tokenizer, line: str, translation: Translation
) -> list[tuple[int, int]]:
    """Pairs (word in `line`, word of the translation) for each word of the translation; words are separated by spaces
    and counted from 0. It is the layer average of Garg et al. (2019): docs/translate.md, "Output formats".
    """
    if not translation.text.split() or not line.split():
        return []
    text, device = line.strip(), model.output_weight.device
    (source,), read = tokenizer.encode_source([text]), [tokenizer.bos_id, *translation.tokens]
    maps = model.attention_maps(torch.tensor([source], device=device), torch.tensor([read], device=device))
    weights_HTS = maps.cross[max(0, len(maps.cross) - 2)][0].float().cpu()
    weights_TS = weights_HTS.mean(0)
    source_words = words_of(text, tokenizer.source_spans(text)[:-1])
    target_words = words_of(translation.text, tokenizer.target_spans(translation.tokens))
    return links(weights_TS[:-1, :-1], source_words, target_words)


def words_of(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Number of the word of each piece of a text: the one at its first character that is no space."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return [min(bisect_right(ends, begin), len(ends) - 1) for begin, _ in spans]


def links(weights_TS: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs (source word, target word) for each target word that has a piece, in order."""
    num_source, num_target = max(source_words) + 1, max(target_words) + 1
    from_words = torch.zeros(len(weights_TS), num_source)
    from_words.index_add_(1, torch.tensor(source_words), weights_TS)
    of_words = torch.zeros(num_target, num_source).index_add_(0, torch.tensor(target_words), from_words)
    chosen = of_words.argmax(1).tolist()
    return [(chosen[word], word) for word in sorted(set(target_words))]
