"""evaluate: translate a test set and score it."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_transformer.cli.arguments import read_run
from dist_transformer.cli.search_options import BeamOption, PenaltyOption, search_settings
from dist_transformer.config.data_models import CorpusConfig, DataConfig
from dist_transformer.config.models import Config
from dist_transformer.errors import UserError
from dist_transformer.run_dir import RunDir

TELL_SECONDS = 10


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model folder with --source.", show_default=False)],
    split: Annotated[
        str, typer.Option(help="Which corpus of the run's YAML: test, validation, or a name of data.more_validation.")
    ] = "test",
    source: Annotated[Path | None, typer.Option(help="Source file, in place of the run's.")] = None,
    target: Annotated[Path | None, typer.Option(help="Reference file, line by line with --source.")] = None,
    beam: BeamOption = None,
    length_penalty: PenaltyOption = None,
    comet: Annotated[
        str | None, typer.Option(help="COMET model to score with as well: its name, or a file.", show_default=False)
    ] = None,
    tokenised: Annotated[
        Literal["moses", "spaces"] | None,
        typer.Option(
            help="BLEU as older papers counted it as well: of Moses' tokens (moses), or of text that is tokenised already "
            "(spaces).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Score a model: sacreBLEU and chrF with their signatures, and the share of exact matches."""
    from dist_transformer.cli.loaded_model import LoadedTranslator, model_folder_of
    from dist_transformer.data.sources import read_pairs
    from dist_transformer.decoding.comet import CometScorer
    from dist_transformer.decoding.score import corpus_scores, tokenised_scores
    from dist_transformer.run_dir import write_json, write_text

    if (source is None) != (target is None):
        raise UserError("--source and --target belong together: give both, or neither")
    folder = model_folder_of(run)
    is_run = (run / "config.yaml").is_file()
    config, run_dir = read_run(run, None, check_files=False) if is_run else (None, None)
    if source is not None and target is not None:
        name, corpus = source.name, CorpusConfig(source=str(source.absolute()), target=str(target.absolute()))
        data = DataConfig(train=corpus)
    elif config is not None:
        name, corpus, data = split, _corpus_of(config.data, split, run), config.data
    else:
        raise UserError(f"{run} is not a run folder: nothing to score; give --source and --target")
    scorer = CometScorer(comet) if comet is not None else None
    sources, references = read_pairs(corpus, data)
    settings = search_settings(run, beam_size=beam, length_penalty=length_penalty, n_best=1)
    translator = LoadedTranslator(folder, settings)
    translations = list(translator.translate(sources))
    measured = corpus_scores(translations, references, translator.information.target_language)
    if tokenised is not None:
        measured |= tokenised_scores(translations, references, tokenised, translator.information.target_language)
    if scorer is not None:
        measured |= {"comet": scorer.score(sources, translations, references), "comet_model": str(comet)}
    scores = {**measured, "pairs": len(references), **settings.model_dump()}
    print(f"{name}: {len(references)} pairs, beam {settings.beam_size}, length penalty {settings.length_penalty}")
    _print_scores(scores)
    if run_dir is not None:
        write_json(run_dir.evaluation / f"{name}.json", scores)
        write_text(run_dir.evaluation / f"{name}.translations", "\n".join(translations) + "\n")
        print(f"written to {run_dir.evaluation}")
        if config is not None and config.tracking.enabled:
            numbers = {key: value for key, value in measured.items() if isinstance(value, float)}
            _tell_mlflow(config, run_dir, {"name": name, "step": translator.information.step, "metrics": numbers})


def _print_scores(scores: dict[str, Any]) -> None:
    for name, key in (
        ("BLEU ", "bleu"),
        ("chrF ", "chrf"),
        ("tokenised BLEU ", "bleu_tokenised"),
        ("compound-split BLEU ", "bleu_compound_split"),
    ):
        if key in scores:
            print(f"{name} {scores[key]:.2f}  {scores[f'{key}_signature']}")
    print(f"exact {100 * float(scores['exact_match']):.2f} %")
    if "comet" in scores:
        print(f"COMET {scores['comet']:.4f}  {scores['comet_model']}")


def _tell_mlflow(config: Config, run_dir: RunDir, scores: dict[str, Any]) -> None:
    """The scores as `evaluation/<name>/bleu` ... of the run, if MLflow follows it and nobody trains it now."""
    from dist_transformer.run_lock import while_nobody_trains
    from dist_transformer.tracking.settle import settle, status_said
    from dist_transformer.tracking.spool import add_event

    status = status_said(run_dir)
    with while_nobody_trains(run_dir) as is_free:
        if status is None or not is_free:
            return
        add_event(run_dir.tracking_events, "evaluation", scores)
        problem = settle(run_dir, status, config.tracking, Path(config.run.root), TELL_SECONDS)
    if problem is not None:
        print(f"MLflow is not told: {problem}", file=sys.stderr)


def _corpus_of(data: DataConfig, split: str, run: Path) -> CorpusConfig:
    """The corpus that --split names."""
    given = {"test": data.test, "validation": data.validation, **data.more_validation}
    if (corpus := given.get(split)) is None:
        there = ", ".join(name for name, found in given.items() if found is not None) or "none"
        where = f"data.{split}" if split in given else f"data.more_validation.{split}"
        raise UserError(
            f"{where} is not given in {run / 'config.yaml'}: nothing to score; give --source and --target, or one of the "
            f"corpora that are there with --split: {there}"
        )
    return corpus
