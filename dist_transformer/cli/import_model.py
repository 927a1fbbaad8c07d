"""import: a model of another program as a model folder, to translate with, to fine-tune (training.init_from), to export."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dist_transformer.errors import UserError

Source = Literal["marian", "torch"]
TokenizerOption = Annotated[Path | None, typer.Option(help="Of torch: the sentencepiece model.")]


def import_command(
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
    heads: Annotated[int | None, typer.Option(min=1, help="Of torch: attention heads.")] = None,
    norm: Annotated[Literal["post", "pre"], typer.Option(help="Of torch: pre where norm_first was true.")] = "post",
    activation: Annotated[Literal["relu", "gelu"], typer.Option(help="Of torch.")] = "relu",
    source_embedding: Annotated[str, typer.Option(help="Of torch: its name in the file.")] = "src_tok_emb.embedding",
    target_embedding: Annotated[str, typer.Option(help="Of torch: its name in the file.")] = "tgt_tok_emb.embedding",
    output: Annotated[str, typer.Option(help="Of torch: the name of the last linear layer.")] = "generator",
) -> None:
    """Make a model folder of a model of another program, with the same logits and token ids."""
    from dist_transformer.interop.whole_folder import refuse_to_overwrite

    refuse_to_overwrite(out)
    if of == "marian":
        from dist_transformer.interop.marian import import_marian

        import_marian(source, out)
    else:
        from dist_transformer.interop.model_folder import TokenizerFiles
        from dist_transformer.interop.torch_transformer import TorchModel, import_torch

        if source_model is None or heads is None:
            raise UserError("--from torch needs --source-model and --heads: a file of weights says neither; give both")
        described = TorchModel(heads, norm, activation, source_embedding, target_embedding, output)
        import_torch(source, out, described, TokenizerFiles(source_model, target_model))
    print(f"{out}: a model folder")
