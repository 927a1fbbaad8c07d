"""evaluate: translate a test set and score it, or score a given translation."""

import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_transformer.cli import arguments as options
from dist_transformer.config.data_schema import MODIFIERS, CorpusConfig, DataConfig
from dist_transformer.config.schema import Config
from dist_transformer.errors import UserError
from dist_transformer.format import progress_bar
from dist_transformer.model.search_interface import Engine
from dist_transformer.plugins import Plugin, find, measure_of
from dist_transformer.run.evaluations import OF_TEXTS, entries_of
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import check_output, write_output
from dist_transformer.run.records import read_record

TELL_SECONDS = 10
SEED_OF_MODIFIERS = 1
NAME_CHARACTERS = 50
"""Characters of a file's name in the name of its results, because file systems allow 255 bytes."""
Tokenised = Literal["moses", "spaces"]


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


def evaluate_command(
    run: Annotated[
        Path | None, typer.Argument(help="A run folder, or a model folder with --source.", show_default=False)
    ] = None,
    split: Annotated[
        str, typer.Option(help="Which corpus of the run's YAML: test, validation, or a name of data.more_validation.")
    ] = "test",
    source: Annotated[Path | None, typer.Option(help="Source file, in place of the run's.")] = None,
    references: Annotated[
        list[Path] | None,
        typer.Option("--reference", "--target", help="Reference file, line by line; may be given several times."),
    ] = None,
    hypothesis: Annotated[
        Path | None, typer.Option(help="A file of translations to score, in place of a model, with --reference.")
    ] = None,
    language_pair: Annotated[
        str, typer.Option(help="Of --hypothesis, --source: en-de; decides how zh, ja, ko are cut.", show_default=False)
    ] = "",
    beam: options.BeamOption = None,
    length_penalty: options.PenaltyOption = None,
    too_long: options.TooLongOption = None,
    max_source_tokens: options.MaxSourceOption = None,
    plugin: options.PluginOption = None,
    engine: Annotated[Engine, typer.Option(help="Who searches: ctranslate2 needs that package.")] = "torch",
    output: Annotated[
        Path | None, typer.Option(help="A file for the scores, as JSON with the speed; the run is then left as it is.")
    ] = None,
    modified: Annotated[
        list[str] | None,
        typer.Option(help="Also score it with each line changed by this one of data.modifiers; several may be given."),
    ] = None,
    metric_plugin: Annotated[
        str | None,
        typer.Option(help="A measure of your own as well, as validation.plugin: FILE.py:NAME.", show_default=False),
    ] = None,
    tokenised: Annotated[
        Tokenised | None,
        typer.Option(
            help="BLEU as older papers counted it as well: of Moses' tokens (moses), or of tokenised text (spaces).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Score a model: sacreBLEU and chrF with their signatures, and the share of exact matches."""
    search = {
        "beam_size": beam, "length_penalty": length_penalty, "too_long": too_long, "max_source_tokens": max_source_tokens,
    }  # fmt: skip
    if (run is None) == (hypothesis is None):
        raise UserError("expected a run or model folder to translate with, or --hypothesis FILE: give one of them")
    if language_pair and hypothesis is None and source is None:
        raise UserError(f"--language-pair {language_pair}: is of --hypothesis or --source; a run's text has its own")
    if hypothesis is not None:
        if not references:
            raise UserError("--hypothesis needs --reference FILE, once for each translation to compare with")
        if any(value is not None for value in search.values()):
            raise UserError("--beam, --length-penalty, --too-long, --max-source-tokens: leave out with --hypothesis")
        if metric_plugin is not None and source is None:
            raise UserError("--metric-plugin gets the source too: give --source FILE")
    if metric_plugin is not None and len(references or []) > 1:
        raise UserError("--metric-plugin compares with one reference: give --reference once")
    if unknown := [name for name in modified or () if name not in MODIFIERS]:
        raise UserError(f"--modified {unknown[0]}: no such modifier; there are {', '.join(MODIFIERS)}")
    if modified and (hypothesis is not None or len(references or []) > 1):
        raise UserError("--modified changes a source, which a model then translates, and one reference")
    if plugin is not None and (hypothesis is not None or engine == "ctranslate2"):
        raise UserError("--plugin: is the code of a model that --engine torch translates with; drop it")
    if output is not None:
        if run is None:
            raise UserError("--output: keeps what a model reaches, and how fast; with --hypothesis leave it out")
        check_output(output, "scores", lambda path: "sentences_per_second" in read_record(path), is_file=True)
    code = re.sub(r"^[^-]+-([A-Z\d]\w*-)?", "", language_pair)  # zh of pt-BR-zh, zh-CN of en-zh-CN
    metric = None if metric_plugin is None else find("--metric-plugin", metric_plugin)
    if metric is not None:
        metric.load()  # its errors are reported before hours of translating
    if run is None:
        assert hypothesis is not None
        translations, others = _read_files(hypothesis, [*(references or []), *filter(None, [source])])
        sources = others.pop() if source is not None else []
        print(f"{hypothesis.name}: {len(translations)} lines, {len(others)} references each")
        _print_scores(_measured(translations, Text(sources, others), code, tokenised, metric))
        return
    found = scored(
        run, split, source, references or [], tokenised, metric, plugin, modified or (), engine, output is None, code, **search
    )  # fmt: skip
    _print_and_write(found, engine, output)
    if output is None and found.run is not None:
        report_to_mlflow(found)


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


def scored(
    folder: Path,
    split: str,
    source: Path | None,
    references: Sequence[Path],
    tokenised: Tokenised | None = None,
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
    run = options.read_run(folder, None, check_files=False) if (folder / "config.yaml").is_file() else None
    text = _files_to_score(folder, source, references) if source is not None else _corpus_to_score(folder, split, run)
    language = text.language or language or information.target_language
    if run is not None and keep:
        try:
            check_output(run[1].evaluation, "results", Path.is_dir)  # before hours of translating
        except UserError as error:
            way = f"evaluate {folder}/model --source FILE --reference FILE"
            raise UserError(f"{error}; or keep no scores: {way}") from None
    search = options.search_settings(folder, **{**settings, "n_best": 1})
    of_model = entries_of(model / WEIGHTS) if run is not None and keep else {}
    opened, total, found = open_search(engine, [model], search, plugin), len(text.sources), []
    changed = {f"{text.name}.{modifier}": _modified(text, modifier) for modifier in modified}
    with progress_bar() as show:
        for name, pairs in {text.name: text, **changed}.items():
            begun, progress = time.monotonic(), lambda done: show("translating", done, total)
            best = translate_lines(opened.searcher, opened.tokenizer, pairs.sources, search, progress=progress)
            translations = [first.text for first, *_ in best]
            seconds = time.monotonic() - begun
            measured = _measured(translations, pairs, language, tokenised, metric)
            of_text = {"pairs": total, **pairs.digests(), "target_language": language}
            scores = {**measured, **of_text, "step": information.step, **search.model_dump(), **of_model}
            if run is not None and keep:
                _write_results(run[1], name, scores, translations, pairs)
                add_scores(model, name, scores)
            found.append(Scored(name, measured, scores, run, seconds))
    return replace(found[0], modified=tuple(found[1:]))


def _files_to_score(folder: Path, source: Path, references: Sequence[Path]) -> Text:
    sources, others = _read_files(source, references)
    text = Text([*options.noting_tags(folder, sources)], others)
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


def _print_and_write(found: Scored, engine: Engine, output: Path | None) -> None:
    """Prints the scores of a model, and where they are; `output` gets them with the speed."""
    name, scores = found.name, found.scores
    print(f"{name}: {scores['pairs']} pairs, beam {scores['beam_size']}, length penalty {scores['length_penalty']}")
    _print_scores(scores)
    for each in found.modified:
        print(each.name, *(f"{key} {value:.2f}" for key, value in each.measured.items() if isinstance(value, float)))
    if output is not None:
        with_speed = {**scores, "engine": engine, "sentences_per_second": scores["pairs"] / found.seconds}
        for each in found.modified:
            with_speed |= {f"{key}.{each.name.rpartition('.')[2]}": value for key, value in each.measured.items()}
        write_output(output, json.dumps(with_speed, indent=1) + "\n")
        print(f"{with_speed['sentences_per_second']:.1f} sentences/s; written to {output}")
    elif found.run is not None:
        print(f"written to {found.run[1].evaluation}")


def _read_files(first: Path, others: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Reads the lines of a file, and of others with as many. DataError: one is missing or empty, is not UTF-8, or has more
    or fewer lines than the first."""
    from dist_transformer.data.sources.corpus import read_pairs

    corpora = [CorpusConfig(source=str(first.absolute()), target=str(other.absolute())) for other in others]
    both = [read_pairs(corpus, DataConfig(train=corpus)) for corpus in corpora]
    return both[0][0], [lines for _, lines in both]


def _measured(
    translations: list[str], pairs: Text, language: str, tokenised: Tokenised | None, metric: Plugin | None
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


def _print_scores(scores: dict[str, Any]) -> None:
    names = {"bleu": "BLEU", "chrf": "chrF", "bleu_tokenised": "tokenised BLEU",
             "bleu_compound_split": "compound-split BLEU"}  # fmt: skip
    for key in (key for key in names if key in scores):
        print(f"{names[key]}  {scores[key]:.2f}  {scores[f'{key}_signature']}")
    print(f"exact {100 * float(scores['exact_match']):.2f} %")
    if "plugin" in scores:
        print(f"plug-in {scores['plugin']:.4f}  {scores['plugin_signature']}")


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
