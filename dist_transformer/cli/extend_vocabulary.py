"""extend-vocabulary: a model folder with new pieces, to be fine-tuned on text that has them."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dist_transformer.cli.arguments import write_utf8
from dist_transformer.errors import UserError
from dist_transformer.run.outputs import check_output

if TYPE_CHECKING:  # at run time this would import torch for every command
    from dist_transformer.interop.model_folder import LoadedModel

Side = Literal["source", "target", "both"]
SHOWN = 20
"""Pieces that the command prints; a file may hold thousands."""
BYTE_ORDER_MARK = "\ufeff"


def extend_vocabulary_command(
    model: Annotated[Path, typer.Argument(help="A model folder, or a run folder.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Where to write the new model folder.", show_default=False)],
    pieces: Annotated[
        list[str] | None, typer.Option(help="A new piece: <bt>, ▁Wetter; may be given several times.")
    ] = None,
    pieces_file: Annotated[Path | None, typer.Option(help="A file with a piece a line.")] = None,
    side: Annotated[Side, typer.Option(help="Which of two separate vocabularies.")] = "both",
) -> None:
    """Add pieces to the vocabulary of a trained model, each with the mean of the rows of the pieces it was cut into."""
    from dist_transformer.decoding.loaded_model import model_folder_of
    from dist_transformer.interop.model_folder import load_model_folder

    asked = [*(pieces or []), *(_lines(pieces_file) if pieces_file is not None else [])]
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


def _lines(path: Path) -> list[str]:
    from dist_transformer.decoding.sharded_files import numbered_lines

    lines = (line.removeprefix(BYTE_ORDER_MARK).strip() for line in numbered_lines(path))
    return [line for line in lines if line]


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
