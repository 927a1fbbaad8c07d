"""import: a model of another program as a model folder, to translate with, to fine-tune (training.init_from), to export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dist_transformer.errors import UserError
from dist_transformer.run.outputs import check_output

Source = Literal["marian", "torch"]
TokenizerOption = Annotated[Path | None, typer.Option(help="Of torch: the sentencepiece model.")]
LanguageOption = Annotated[str, typer.Option(help="Of torch: its code, for those who read the folder.")]


def import_command(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="A folder of a MarianMTModel, or a file of weights.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="A new model folder to write.", show_default=False)],
    of: Annotated[
        Source,
        typer.Option(
            "--from", help="marian: of Hugging Face, OPUS-MT; torch: torch.nn.Transformer.", show_default=False
        ),
    ],
    source_model: TokenizerOption = None,
    target_model: Annotated[Path | None, typer.Option(help="Of torch: the target side's, where not the same.")] = None,
    source_language: LanguageOption = "",
    target_language: LanguageOption = "",
    heads: Annotated[int | None, typer.Option(min=1, help="Of torch: attention heads.")] = None,
    norm: Annotated[Literal["post", "pre"], typer.Option(help="Of torch: pre where norm_first was true.")] = "post",
    activation: Annotated[Literal["relu", "gelu"], typer.Option(help="Of torch.")] = "relu",
    source_embedding: Annotated[str, typer.Option(help="Of torch: its name in the file.")] = "src_tok_emb.embedding",
    target_embedding: Annotated[str, typer.Option(help="Of torch: its name in the file.")] = "tgt_tok_emb.embedding",
    output: Annotated[str, typer.Option(help="Of torch: the name of the last linear layer.")] = "generator",
) -> None:
    """Make a model folder of a model of another program, with the same logits and token ids."""
    check_output(out, "a model folder")
    if of == "marian":
        from dist_transformer.interop.marian import import_marian

        _refuse_options_of_torch(context)
        if not source.is_dir():
            raise UserError(
                f"{source}: expected the folder of a MarianMTModel, found a file or nothing; give the folder"
            )
        import_marian(source, out)
    else:
        from dist_transformer.interop.model_folder import TokenizerFiles
        from dist_transformer.interop.torch_transformer import TorchModel, import_torch

        if source_model is None or heads is None:
            raise UserError("--from torch needs --source-model and --heads: a file of weights says neither; give both")
        described = TorchModel(heads, norm, activation, source_embedding, target_embedding, output)
        files = TokenizerFiles(source_model, target_model)
        import_torch(source, out, described, files, (source_language, target_language))
    print(f"{out}: a model folder. To train it further, in the YAML of a run:")
    print("\n".join(_sections(out)))


def _refuse_options_of_torch(context: typer.Context) -> None:
    of_both = {"source", "out", "of"}
    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in of_both and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise UserError(
            f"{', '.join(given)}: of --from torch; a Marian folder says all that itself: leave out what is not for it"
        )


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
