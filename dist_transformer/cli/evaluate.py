"""evaluate: translate a test set and score it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dist_transformer.cli.arguments import read_run
from dist_transformer.cli.translate import BeamOption, PenaltyOption, decoding
from dist_transformer.config.data_models import CorpusConfig, DataConfig
from dist_transformer.errors import UserError


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model folder with --source.", show_default=False)],
    split: Annotated[Literal["test", "validation"], typer.Option(help="Which corpus of the run's YAML.")] = "test",
    source: Annotated[Path | None, typer.Option(help="Source file, in place of the run's.")] = None,
    target: Annotated[Path | None, typer.Option(help="Reference file, line by line with --source.")] = None,
    beam: BeamOption = None,
    length_penalty: PenaltyOption = None,
) -> None:
    """Score a model: sacreBLEU and chrF with their signatures, and the share of exact matches."""
    from dist_transformer.cli.loaded_model import LoadedTranslator, model_folder_of
    from dist_transformer.decoding.score import corpus_scores
    from dist_transformer.run_dir import write_json, write_text

    if (source is None) != (target is None):
        raise UserError("--source and --target belong together: give both, or neither")
    folder = model_folder_of(run)
    is_run = (run / "config.yaml").is_file()
    config, run_dir = read_run(run, None, check_files=False) if is_run else (None, None)
    if source is not None and target is not None:
        name, corpus = source.name, CorpusConfig(source=str(source.absolute()), target=str(target.absolute()))
        data = DataConfig(train=corpus)
    elif config is not None and (found := getattr(config.data, split)) is not None:
        name, corpus, data = split, found, config.data
    else:
        where = f"data.{split} is not given in {run / 'config.yaml'}" if is_run else f"{run} is not a run folder"
        raise UserError(f"{where}: nothing to score; give --source and --target")
    sources, references = _read(corpus, data)
    settings = decoding(beam, length_penalty, config.decoding if config else None)
    translations = list(LoadedTranslator(folder, settings).translate(sources))
    scores = {**corpus_scores(translations, references), "pairs": len(references), **settings.model_dump()}
    print(f"{name}: {len(references)} pairs, beam {settings.beam_size}, length penalty {settings.length_penalty}")
    print(f"BLEU  {scores['bleu']:.2f}  {scores['bleu_signature']}")
    print(f"chrF  {scores['chrf']:.2f}  {scores['chrf_signature']}")
    print(f"exact {100 * float(scores['exact_match']):.2f} %")
    if run_dir is not None:
        write_json(run_dir.evaluation / f"{name}.json", scores)
        write_text(run_dir.evaluation / f"{name}.translations", "\n".join(translations) + "\n")
        print(f"written to {run_dir.evaluation}")


def _read(corpus: CorpusConfig, data: DataConfig) -> tuple[list[str], list[str]]:
    from dist_transformer.data.sources import read_corpus

    sources, references = [], []
    for batch in read_corpus(corpus, data, 4096):
        sources += [text or "" for text in batch.source]
        references += [text or "" for text in batch.target]
    return sources, references
