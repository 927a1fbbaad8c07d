"""average, verify: the checkpoints of a run as a model folder; at rest, against their manifests. export, import: a model folder
in the format of another program, and of its model. extend-vocabulary: one with new pieces, for text that has them."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dist_transformer.cli.arguments import ModelArgument, RunFolder, write_utf8
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.format import progress_bar
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import check_output
from dist_transformer.run.read_run import read_run_folder
from dist_transformer.run.records import read_record

if TYPE_CHECKING:  # at run time this would import torch for every command
    from dist_transformer.interop.model_folder import LoadedModel

Format = Literal["marian", "marian-npz", "ctranslate2", "argos"]
Quantization = Literal["int8", "int16", "float16", "bfloat16"]
Side = Literal["source", "target", "both"]
SHOWN = 20
"""Pieces that the command prints; a file may hold thousands."""


def average_command(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option(help="Where to write; default: the run's model/.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Average the newest so many checkpoints (6.1).")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Average those best by validation.metric.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of training.ema_decay.")] = False,
    step: Annotated[list[int] | None, typer.Option(help="Average those of these steps; one: take it.")] = None,
) -> None:
    """Make a model folder of a run's checkpoints; without an option: as set by checkpoints.final_model."""
    from dist_transformer.data.manifest import Manifest
    from dist_transformer.data.prepare.preparation import prepared_folder
    from dist_transformer.interop.model_folder import MODEL_FOLDER, is_model_folder
    from dist_transformer.training.checkpoint.final_model import Averaged, write_final_model

    choices = {
        "--last": Averaged("average_last", last) if last else None,
        "--best": Averaged("average_best", best) if best else None,
        "--ema": Averaged("ema") if ema else None,
        "--step": Averaged("steps", len({*step}), tuple(step)) if step else None,
    }
    given = {option: choice for option, choice in choices.items() if choice}
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other: give one of --last, --best, --ema and --step")
    choice = next(iter(given.values()), None)
    config, run_dir = read_run_folder(run)
    output = output or run_dir.model
    other = RunDir((real := Path(os.path.realpath(output))).parent)
    if real == other.model and other.config.is_file() and not os.path.samefile(other.path, run_dir.path):
        raise UserError(f"{output}: is the model of another run; give a path outside {other.path}")
    check_output(output, MODEL_FOLDER, is_model_folder)
    folder = prepared_folder(config)
    with progress_bar() as show:
        show("checking the checkpoints", 0, None)
        written = write_final_model(config, run_dir, folder, Manifest.load(folder), output, choice, show)
    print(f"{output}: {written}")


def verify_command(run: RunFolder) -> None:
    """Read every byte of a run's checkpoints and compare it with their checksums. Nothing is changed."""
    from dist_transformer.training.checkpoint import checkpoints

    if not run.is_dir():
        raise UserError(f"{run}: no such run folder")
    problems, number = [], 0
    total = len([*RunDir(run).checkpoints.glob("step_*")])
    with progress_bar() as show:
        for number, (path, problem) in enumerate(checkpoints.verified(RunDir(run)), start=1):
            print(f"{path.name}  {problem or 'undamaged'}", flush=True)
            show("verifying", number, total)
            problems += [path.name] if problem else []
    if not number:
        step = read_record(RunDir(run).state).get("step", 0)
        purged = f", although run.json says that step {step} was saved: was it purged?" if step else ""
        raise UserError(f"{run}: has no checkpoint to verify; expected a run folder with checkpoints/step_...{purged}")
    if problems:
        raise CheckpointError(
            f"{run}: damaged: {', '.join(problems)}. A start takes the newest undamaged one and sets damaged ones aside; copy "
            "them back from elsewhere if you have them"
        )


def export_command(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="A new folder to write; of argos, a file.")],
    to: Annotated[
        Format, typer.Option(help="marian: of Hugging Face; marian-npz: Marian itself; ctranslate2; argos: a package.")
    ],
    quantization: Annotated[
        Quantization | None, typer.Option(help="Of ctranslate2 and argos: how the matrices are kept; default: fp32.")
    ] = None,
    shortlist: Annotated[
        list[Path] | None, typer.Option(help="Of ctranslate2: a run's lexicon.npz; or twice: source and target text.")
    ] = None,
) -> None:
    """Write a model folder in the format of another program, tokenizer included."""
    from dist_transformer.decoding.loaded_model import model_folder_of
    from dist_transformer.interop.ctranslate2_export import export_argos, export_ctranslate2
    from dist_transformer.interop.marian import export_marian
    from dist_transformer.interop.marian_npz import export_marian_npz
    from dist_transformer.interop.model_folder import load_model_folder

    if quantization is not None and to in ("marian", "marian-npz"):
        raise UserError(f"--quantization {quantization}: is of ctranslate2 and argos; drop it, {to} models are fp32")
    if shortlist and to != "ctranslate2":
        raise UserError(f"--shortlist {shortlist[0]}: is of --to ctranslate2; drop it, {to} reads none")
    check_output(out, "a new folder", is_file=to == "argos")
    with progress_bar() as show:
        show("exporting", 0, None)
        loaded = load_model_folder(model_folder_of(model))
        if to == "ctranslate2":
            export_ctranslate2(loaded, out, quantization, shortlist or ())
        elif to == "argos":
            export_argos(loaded, out, quantization)
        else:
            (export_marian if to == "marian" else export_marian_npz)(loaded, out)
    print(f"{out}: written for {to}")


def import_command(
    source: Annotated[Path, typer.Argument(help="The folder of the other program's model.")],
    out: Annotated[Path, typer.Argument(help="A new model folder to write.")],
    of: Annotated[
        Literal["marian", "marian-npz", "eole"],
        typer.Option("--from", help="marian: of Hugging Face, OPUS-MT; marian-npz: Marian's own; eole."),
    ],
) -> None:
    """Make a model folder of a model of another program, with the same logits and token ids."""
    from dist_transformer.interop.eole import import_eole
    from dist_transformer.interop.marian import import_marian
    from dist_transformer.interop.marian_npz import import_marian_npz

    check_output(out, "a model folder")
    if not source.is_dir():
        raise UserError(f"{source}: expected the folder of a model, found none; a model of the Hub is downloaded first")
    {"marian": import_marian, "marian-npz": import_marian_npz, "eole": import_eole}[of](source, out)
    print(f"{out}: a model folder. To train it further, in the YAML of a run:")
    print("\n".join(_sections(out)))


def _sections(folder: Path) -> Iterator[str]:
    """Lines of a run's YAML that starts from this model; the sizes that differ from the defaults."""
    from dist_transformer.config.schema import ModelConfig
    from dist_transformer.interop.model_folder import SOURCE_MODEL, TARGET_MODEL, read_config

    config, _ = read_config(folder)
    target = TARGET_MODEL if (folder / TARGET_MODEL).exists() else SOURCE_MODEL
    tokenizer: dict[str, Any] = {"source_model": str(folder / SOURCE_MODEL)}
    if target == TARGET_MODEL or not config.shared_embeddings:
        tokenizer["target_model"] = str(folder / target)
    if not config.shared_embeddings:
        tokenizer["shared"] = False
    defaults = ModelConfig()
    model = {name: value for name, value in config.model_dump(mode="json").items() if value != getattr(defaults, name)}
    for name, section in (("tokenizer", tokenizer), ("model", model), ("training", {"init_from": str(folder)})):
        if section:
            yield f"{name}: {{{', '.join(f'{key}: {json.dumps(value)}' for key, value in section.items())}}}"


def extend_vocabulary_command(
    model: ModelArgument,
    output: Annotated[Path, typer.Argument(help="Where to write the new model folder.")],
    pieces: Annotated[
        list[str] | None, typer.Option(help="A new piece: <bt>, ▁Wetter; may be given several times.")
    ] = None,
    pieces_file: Annotated[Path | None, typer.Option(help="A file with a piece a line.")] = None,
    side: Annotated[Side, typer.Option(help="Which of two separate vocabularies.")] = "both",
) -> None:
    """Add pieces to the vocabulary of a trained model, each with the mean of the rows of the pieces it was cut into."""
    from dist_transformer.decoding.loaded_model import model_folder_of
    from dist_transformer.decoding.sharded_files import numbered_lines
    from dist_transformer.interop.model_folder import load_model_folder

    asked = [*(pieces or [])]
    if pieces_file is not None:
        asked += filter(None, map(str.strip, numbered_lines(pieces_file)))
    if not asked:
        raise UserError("there is no piece to add: give --pieces '<bt>', any number of times, or --pieces-file FILE")
    check_output(output, "a model folder")
    folder = model_folder_of(model)
    loaded = load_model_folder(folder)
    if side != "both" and (loaded.config.shared_embeddings or loaded.tokenizer_files.target is None):
        raise UserError(f"--side {side}: {folder} has one vocabulary for both sides; leave --side out")
    added = _extend(loaded, asked, side, output)
    write_utf8()
    more = f" and {len(added) - SHOWN} more" if len(added) > SHOWN else ""
    print(f"{output}: {len(added)} new pieces: {' '.join(added[:SHOWN])}{more}")
    target = [f"tokenizer.target_model={output / 'target.model'}"] if loaded.tokenizer_files.target is not None else []
    settings = [f"tokenizer.source_model={output / 'source.model'}", *target, f"training.init_from={output}"]
    print(f"fine-tune it with: {shlex.join(settings)}")


def _extend(loaded: "LoadedModel", asked: Sequence[str], side: Side, output: Path) -> list[str]:
    """Writes the new folder; returns the pieces that the model did not have."""
    from dist_transformer.data.tokenizer.tokenizer import Tokenizer
    from dist_transformer.interop.model_card import Origin
    from dist_transformer.interop.model_folder import SOURCE_MODEL, TARGET_MODEL, TokenizerFiles, save_model_folder
    from dist_transformer.interop.vocabulary_extension import add_pieces, extended_weights, growth_of, missing_pieces

    source, target = loaded.tokenizer_files.source, loaded.tokenizer_files.target
    of_source = missing_pieces(source, asked) if side != "target" else []
    of_target = missing_pieces(target or source, asked) if side != "source" else []
    if not of_source and not of_target:
        raise UserError(f"the vocabulary has all of {' '.join(asked[:SHOWN])} already: there is nothing to add")
    with TemporaryDirectory() as name:
        new = TokenizerFiles(Path(name, SOURCE_MODEL), Path(name, TARGET_MODEL) if target else None)
        add_pieces(source, of_source, new.source)
        if target is not None and new.target is not None:
            add_pieces(target, of_target, new.target)
        tokenizer, before = Tokenizer.load(new.source, new.target), loaded.information
        weights = extended_weights(
            dict(loaded.model.named_parameters()),
            growth_of(source, of_source, tokenizer.source_vocabulary, before.pad_id),
            growth_of(target or source, of_target, tokenizer.target_vocabulary, before.pad_id),
            loaded.config.shared_embeddings,
        )
        names = ("source_vocabulary", "target_vocabulary", "pad_id")
        information = replace(before, **{name: getattr(tokenizer, name) for name in names})
        origin = Origin("another model with a larger vocabulary")
        save_model_folder(output, weights, loaded.config, new, information, origin)
    return list(dict.fromkeys([*of_source, *of_target]))
