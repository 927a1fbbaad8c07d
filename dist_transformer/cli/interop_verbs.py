"""export, import: a model folder in the format of another program; a model of another program as a model folder, to
translate with, to fine-tune (training.init_from), to export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_transformer.errors import UserError
from dist_transformer.format import progress_bar
from dist_transformer.run.outputs import check_output

Format = Literal["marian", "marian-npz", "ctranslate2", "argos"]
Quantization = Literal["int8", "int16", "float16", "bfloat16"]


def export_command(
    model: Annotated[Path, typer.Argument(help="A model folder, or a run folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder to write; of argos, a file.", show_default=False)],
    to: Annotated[
        Format,
        typer.Option(
            help="marian: of Hugging Face; marian-npz: Marian itself; ctranslate2; argos: a package.",
            show_default=False,
        ),
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
    source: Annotated[Path, typer.Argument(help="The folder of the other program's model.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new model folder to write.", show_default=False)],
    of: Annotated[
        Literal["marian", "marian-npz", "eole"],
        typer.Option(
            "--from", help="marian: of Hugging Face, OPUS-MT; marian-npz: Marian's own; eole.", show_default=False
        ),
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
