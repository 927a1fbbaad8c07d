"""import: a model of another program as a model folder, to translate with, to fine-tune (training.init_from), to export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_transformer.errors import UserError
from dist_transformer.run.outputs import check_output


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
        raise UserError(f"{source}: expected the folder of a model, found a file or nothing; give the folder")
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
