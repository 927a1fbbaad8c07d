"""export: a model folder in the format of another program."""

from pathlib import Path
from typing import Annotated, Literal

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
    from dist_transformer.interop.argos import export_argos
    from dist_transformer.interop.ctranslate2_export import export_ctranslate2
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
