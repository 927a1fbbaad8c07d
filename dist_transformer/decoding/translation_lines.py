"""Output formats of translations: plain lines, n-best lists as in Moses and Marian, word alignment, JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.engines import Search
from dist_transformer.decoding.translate import Translation
from dist_transformer.decoding.word_alignment import word_alignment
from dist_transformer.model.search_interface import Engine


@dataclass(frozen=True)
class Form:
    """Output format of the translations of a line.

    Attributes:
        n_best: a line for each translation: number of the line, text, log-probability, score.
        alignment: also pairs of words.
        as_json: one object per line, with everything.
    """

    n_best: bool
    alignment: bool
    as_json: bool


@dataclass(frozen=True)
class Task:
    """Settings of `translate`, independent of the source of the lines.

    Attributes:
        models: model folders or run folders; several are an ensemble.
        prefix: a file with the beginning of each line's translations; None: not prescribed.
    """

    models: Sequence[Path]
    settings: DecodingConfig
    engine: Engine
    form: Form
    prefix: Path | None


def written(form: Form, search: Search, number: int, line: str, translations: Sequence[Translation]) -> str:
    """Output for the translations of a line, numbered from 0: one line of text, or one for each of the n best."""
    if form.as_json:
        return _json(form, search, line, translations)
    if not form.n_best:
        return " ||| ".join([translations[0].text, *_links(form, search, line, translations[0])])
    return "\n".join(
        " ||| ".join(
            [
                str(number),
                translation.text,
                f"log_probability= {translation.log_probability:.4f}",
                f"{translation.score:.4f}",
                *_links(form, search, line, translation),
            ]
        )
        for translation in translations
    )


def _links(form: Form, search: Search, line: str, translation: Translation) -> list[str]:
    if not form.alignment:
        return []
    links = word_alignment(search.models[0], search.tokenizer, line, translation)
    return [" ".join(f"{source}-{target}" for source, target in links)]


def _json(form: Form, search: Search, line: str, translations: Sequence[Translation]) -> str:
    records = []
    for translation in translations:
        record = asdict(translation) | {"pieces": search.tokenizer.target_pieces(translation.tokens)}
        if form.alignment:
            record["alignment"] = word_alignment(search.models[0], search.tokenizer, line, translation)
        records.append(record)
    return json.dumps({"source": line, "translations": records}, ensure_ascii=False)
