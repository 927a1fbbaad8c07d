"""evaluate: translate a test set and score it, or score a given translation."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_transformer.cli import arguments as options
from dist_transformer.config.data_schema import MODIFIERS
from dist_transformer.config.metrics import Words
from dist_transformer.decoding import evaluation
from dist_transformer.errors import UserError
from dist_transformer.model.search_interface import Engine
from dist_transformer.plugins import find
from dist_transformer.run.outputs import check_output, write_output
from dist_transformer.run.records import read_record


def evaluate_command(
    run: Annotated[Path | None, typer.Argument(help="A run folder, or a model folder with --source.")] = None,
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
        str, typer.Option(help="Of --hypothesis, --source: en-de; decides how zh, ja, ko are cut.")
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
        str | None, typer.Option(help="A measure of your own as well, as validation.plugin: FILE.py:NAME.")
    ] = None,
    tokenised: Annotated[
        Words | None,
        typer.Option(
            help="BLEU as older papers counted it as well: of Moses' tokens (moses), or of tokenised text (spaces)."
        ),
    ] = None,
) -> None:
    """Score a model: sacreBLEU and chrF with their signatures, and the share of exact matches."""
    search = dict(beam_size=beam, length_penalty=length_penalty, too_long=too_long, max_source_tokens=max_source_tokens)
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
        translations, others = evaluation.read_aligned(hypothesis, [*(references or []), *filter(None, [source])])
        if translations and translations[0].startswith('{"source": '):
            raise UserError(
                f"--hypothesis {hypothesis}: expected text, got what `translate --json` writes; leave it out there"
            )
        sources = others.pop() if source is not None else []
        print(f"{hypothesis.name}: {len(translations)} lines, {len(others)} references each")
        _print_scores(evaluation.measured_by(translations, evaluation.Text(sources, others), code, tokenised, metric))
        return
    found = evaluation.evaluate_model(
        run, split, source, references or [], tokenised, metric, plugin, modified or (), engine, output is None, code, **search
    )  # fmt: skip
    _print_and_write(found, engine, output)
    if output is None and found.run is not None:
        evaluation.report_to_mlflow(found)


def _print_and_write(found: evaluation.Scored, engine: Engine, output: Path | None) -> None:
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


def _print_scores(scores: dict[str, Any]) -> None:
    names = {"bleu": "BLEU", "chrf": "chrF", "bleu_tokenised": "tokenised BLEU",
             "bleu_compound_split": "compound-split BLEU"}  # fmt: skip
    for key in (key for key in names if key in scores):
        print(f"{names[key]}  {scores[key]:.2f}  {scores[f'{key}_signature']}")
    print(f"exact {100 * float(scores['exact_match']):.2f} %")
    if "plugin" in scores:
        print(f"plug-in {scores['plugin']:.4f}  {scores['plugin_signature']}")
