"""Scores of a model on a test set: of a run, which keeps them and tells MLflow, or of files.

Modules that import torch are imported late: scores of a translation that is there need none.
"""

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.metrics import Words
from dist_transformer.config.schema import Config
from dist_transformer.decoding.search_settings import noting_tags, search_settings
from dist_transformer.errors import UserError
from dist_transformer.format import progress_bar
from dist_transformer.model.search_interface import Engine
from dist_transformer.plugins import Plugin, measure_of
from dist_transformer.run.evaluations import OF_TEXTS, entries_of
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import check_output
from dist_transformer.run.read_run import read_run

TELL_SECONDS = 10
SEED_OF_MODIFIERS = 1
NAME_CHARACTERS = 50
"""Characters of a file's name in the name of its results, because file systems allow 255 bytes."""


@dataclass(frozen=True)
class Text:
    """Sentences and one or more translations of them, line by line; `sources` may be empty if nothing is translated.

    `language`: of the target, "" if it is not known; `prefix`: the tags of each line of the source.
    """

    sources: list[str]
    references: list[list[str]]
    name: str = ""
    language: str = ""
    prefix: str = ""

    def digests(self) -> dict[str, Any]:
        """Digests that identify the sentences, whatever the names of their files."""
        return {
            "source_sha256": _digest(self.sources),
            "reference_sha256": [_digest(lines) for lines in self.references],
        }


@dataclass(frozen=True)
class Scored:
    """Scores of a translated corpus. `measured`: of the translation alone; `scores`: with the corpus and the search.

    `run`: None if a model folder was scored. `seconds`: of the search alone. `modified`: of the same corpus, modified, as
    `<corpus>.<modifier>`.
    """

    name: str
    measured: dict[str, Any]
    scores: dict[str, Any]
    run: tuple[Config, RunDir] | None
    seconds: float
    modified: "tuple[Scored, ...]" = ()


def evaluate_model(
    folder: Path,
    split: str,
    source: Path | None,
    references: Sequence[Path],
    tokenised: Words | None = None,
    metric: Plugin | None = None,
    plugin: str | None = None,
    modified: Sequence[str] = (),
    engine: Engine = "torch",
    keep: bool = True,
    language: str = "",
    **settings: Any,
) -> Scored:
    """Translates a corpus of a run, or files, and scores the translation.

    A run folder keeps scores, translations and references in evaluation/, unless `keep` is false. The other arguments are
    the options of `evaluate_command`; `settings` are those of the search. Raises UserError: there is no model, or nothing to
    score.
    """
    if (source is None) != (not references):
        raise UserError("--source and --reference belong together: give both, or neither")
    if settings.get("n_best", 1) != 1:
        raise UserError(f"n_best: got {settings['n_best']}, but one translation of each line is scored; leave it out")
    from dist_transformer.decoding.engines import folders_of, open_search
    from dist_transformer.decoding.translate import translate_lines
    from dist_transformer.interop.ctranslate2_export import is_exported, load_exported
    from dist_transformer.interop.model_card import add_scores
    from dist_transformer.interop.model_folder import WEIGHTS, read_config

    [model] = folders_of(engine, [folder])
    information = load_exported(model)[0] if is_exported(model) else read_config(model)[1]
    run = read_run(folder, None, check_files=False) if (folder / "config.yaml").is_file() else None
    text = _files_to_score(folder, source, references) if source is not None else _corpus_to_score(folder, split, run)
    language = text.language or language or information.target_language
    if run is not None and keep:
        try:
            check_output(run[1].evaluation, "results", Path.is_dir)  # before hours of translating
        except UserError as error:
            way = f"evaluate {folder}/model --source FILE --reference FILE"
            raise UserError(f"{error}; or keep no scores: {way}") from None
    search = search_settings(folder, **{**settings, "n_best": 1})
    of_model = entries_of(model / WEIGHTS) if run is not None and keep else {}
    opened, total, found = open_search(engine, [model], search, plugin), len(text.sources), []
    changed = {f"{text.name}.{modifier}": _modified(text, modifier) for modifier in modified}
    with progress_bar() as show:
        for name, pairs in {text.name: text, **changed}.items():
            begun, progress = time.monotonic(), lambda done: show("translating", done, total)
            best = translate_lines(opened.searcher, opened.tokenizer, pairs.sources, search, progress=progress)
            translations = [first.text for first, *_ in best]
            seconds = time.monotonic() - begun
            measured = measured_by(translations, pairs, language, tokenised, metric)
            of_text = {"pairs": total, **pairs.digests(), "target_language": language}
            scores = {**measured, **of_text, "step": information.step, **search.model_dump(), **of_model}
            if run is not None and keep:
                _write_results(run[1], name, scores, translations, pairs)
                add_scores(model, name, scores)
            found.append(Scored(name, measured, scores, run, seconds))
    return replace(found[0], modified=tuple(found[1:]))


def _files_to_score(folder: Path, source: Path, references: Sequence[Path]) -> Text:
    sources, others = read_aligned(source, references)
    text = Text([*noting_tags(folder, sources)], others)
    return replace(text, name=f"{source.name[:NAME_CHARACTERS]}-{_digest([str(text.digests())])[:8]}")


def _corpus_to_score(folder: Path, split: str, run: tuple[Config, RunDir] | None) -> Text:
    """Reads a corpus of the run. UserError: it has none of that name, or is a model folder, which has none at all."""
    from dist_transformer.data.sources.corpus import read_pairs
    from dist_transformer.data.sources.text import tag_prefix

    if run is None:
        raise UserError(f"{folder} is not a run folder: nothing to score; give --source and --reference")
    data = run[0].data
    given = {key.removeprefix("more_validation."): corpus for key, corpus in data.held_out_corpora().items()}
    if (corpus := given.get(split)) is None:
        where = f"data.{split}" if split in ("test", "validation") else f"data.more_validation.{split}"
        raise UserError(
            f"{where} is not given in {folder / 'config.yaml'}: nothing to score; give --source and --reference, or one of "
            f"the corpora that are there with --split: {', '.join(given) or 'none'}"
        )
    sources, lines = read_pairs(corpus, data)
    return Text(sources, [lines], split, data.languages_of(corpus)[1], tag_prefix(corpus.tags))


def _write_results(run_dir: RunDir, name: str, scores: dict[str, Any], translations: list[str], pairs: Text) -> None:
    """Writes the scores, and the translations and references, by which `compare` tells significance."""
    from dist_transformer.files import write_json, write_text

    kept = [translations, *([line.replace("\n", " ") for line in lines] for lines in pairs.references)]
    digest = _digest([line for lines in kept for line in lines])
    write_json(run_dir.evaluation / f"{name}.json", {**scores, OF_TEXTS: digest})
    for number, lines in enumerate(kept):
        ending = f"reference{number}" if number else "translations"
        write_text(run_dir.evaluation / f"{name}.{ending}", "".join(f"{line}\n" for line in lines))


def _modified(text: Text, modifier: str) -> Text:
    """Returns the text, each line modified, always in the same way."""
    from dist_transformer.data.loader.window_request import RowSlice
    from dist_transformer.data.modifiers import Modifiers

    sources, references = [*text.sources], [*text.references[0]]
    rows = RowSlice(0, 0, 0, len(sources))
    Modifiers({modifier: 1.0}, SEED_OF_MODIFIERS, text.prefix).modify(rows, range(len(sources)), sources, references)
    return Text(sources, [references])


def read_aligned(first: Path, others: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Reads the lines of a file, and of others with as many. DataError: one is missing or empty, is not UTF-8, or has more
    or fewer lines than the first."""
    from dist_transformer.data.sources.corpus import read_pairs

    corpora = [CorpusConfig(source=str(first.absolute()), target=str(other.absolute())) for other in others]
    both = [read_pairs(corpus, DataConfig(train=corpus)) for corpus in corpora]
    return both[0][0], [lines for _, lines in both]


def measured_by(
    translations: list[str], pairs: Text, language: str, tokenised: Words | None, metric: Plugin | None
) -> dict[str, Any]:
    from dist_transformer.data.prepare.report import warn_of_cut_text
    from dist_transformer.decoding.metrics import corpus_scores, tokenised_scores

    if tokenised is None:
        warn_of_cut_text("the references", [line for lines in pairs.references for line in lines])
    measured = corpus_scores(translations, pairs.references, language)
    if tokenised is not None:
        measured |= tokenised_scores(translations, pairs.references, tokenised, language)
    if metric is not None:
        measured["plugin"] = measure_of(metric)(translations, pairs.references[0], pairs.sources)
        measured["plugin_signature"] = metric.identity
    return measured


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")).hexdigest()


def report_to_mlflow(found: Scored) -> None:
    """Sends the scores as `evaluation/<name>/bleu` ... of the run, if MLflow tracks it; a failure is said and no error."""
    if found.run is None or not found.run[0].tracking.enabled:
        return
    from dist_transformer.run.lock import while_nobody_trains
    from dist_transformer.run.metrics_log import add_event
    from dist_transformer.tracking.final_status import settle, status_said

    config, run_dir = found.run
    if (status := status_said(run_dir)) is None:
        return
    problem: str | None = "the run is being trained, or its lock cannot be taken; evaluate again when it has ended"
    with while_nobody_trains(run_dir) as is_free:
        for each in (found, *found.modified) if is_free else ():
            numbers = {key: value for key, value in each.measured.items() if isinstance(value, float)}
            said = {"name": each.name, "step": each.scores["step"], "metrics": numbers}
            add_event(run_dir.tracking_events, "evaluation", said)
        if is_free:
            problem = settle(run_dir, status, config.tracking, Path(config.run.root), TELL_SECONDS)
    if problem is not None:
        print(f"not reported to MLflow: {problem}", file=sys.stderr)
