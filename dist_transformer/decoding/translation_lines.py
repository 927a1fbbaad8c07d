"""Output formats of translations: plain lines, n-best lists as in Moses and Marian, word alignment, JSON."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from pathlib import Path

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.engines import Search
from dist_transformer.decoding.translate import Translation, translate_lines
from dist_transformer.decoding.word_alignment import word_alignment
from dist_transformer.model.search_interface import Engine


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
        return " ||| ".join([translations[0].text, *_links(task, search, line, translations[0])])
    lines = []
    for each in translations:
        scores = [f"log_probability= {each.log_probability:.4f}", f"{each.score:.4f}"]
        lines.append(" ||| ".join([str(number), each.text, *scores, *_links(task, search, line, each)]))
    return "\n".join(lines)


def most_alike(translations: Sequence[Translation]) -> Translation:
    """Returns the translation with the highest mean chrF against the others, of equals the first: minimum Bayes risk."""
    from fastchrf import pairwise_chrf  # an extra

    texts = [translation.text for translation in translations]
    (scores,) = pairwise_chrf([texts], [texts])
    sums = [sum(row) - row[number] for number, row in enumerate(scores)]
    return translations[sums.index(max(sums))]


def _links(task: Task, search: Search, line: str, translation: Translation) -> list[str]:
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
