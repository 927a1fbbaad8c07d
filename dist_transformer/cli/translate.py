"""translate: lines in, translations out."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import read_run
from dist_transformer.config.models import DecodingConfig
from dist_transformer.errors import UserError

ModelArgument = Annotated[Path, typer.Argument(help="A model folder, or a run folder.", show_default=False)]
BeamOption = Annotated[int | None, typer.Option(min=1, help="Beam size (6.1: 4).")]
PenaltyOption = Annotated[float | None, typer.Option(min=0.0, help="Length penalty alpha (6.1: 0.6).")]


def translate_command(model: ModelArgument, beam: BeamOption = None, length_penalty: PenaltyOption = None) -> None:
    """Translate standard input to standard output, a line each, in order; empty lines stay empty."""
    from dist_transformer.cli.loaded_model import LoadedTranslator, model_folder_of

    base = read_run(model, None)[0].decoding if (model / "config.yaml").is_file() else None
    translator = LoadedTranslator(model_folder_of(model), decoding(beam, length_penalty, base))
    for translation in translator.translate(_standard_input()):
        print(translation, flush=True)


def decoding(beam: int | None, length_penalty: float | None, base: DecodingConfig | None = None) -> DecodingConfig:
    """The settings of a search, with what the command line gives over `base`."""
    given = {"beam_size": beam, "length_penalty": length_penalty}
    settings = base or DecodingConfig()
    return settings.model_copy(update={key: value for key, value in given.items() if value is not None})


def _standard_input() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input, line {number}: not valid UTF-8 ({error.reason}); convert it first"
            ) from None
