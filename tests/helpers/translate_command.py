"""The verbs that translate and score, in this process, and model folders with random weights for them."""

from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.schema import DecodingConfig, ModelConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.model.transformer import Transformer

SIZES: dict[str, Any] = dict(d_model=32, d_ff=64, num_heads=2, num_encoder_layers=1, num_decoder_layers=2)
SETTINGS = DecodingConfig(beam_size=2, max_extra_tokens=5)
SOURCES = [source for _, (source, _) in zip(range(600), demo_pairs("train"), strict=False)]
LINES = [*SOURCES[:4], "", "  ", SOURCES[4]]


def make_model(folder: Path, tokenizer_file: Path, seed: int) -> Path:
    """A model folder with random weights, scaled so that the source matters."""
    config = ModelConfig(**SIZES)
    tokenizer = Tokenizer.load(tokenizer_file)
    size = tokenizer.source_vocabulary
    torch.manual_seed(seed)
    model = Transformer(config, size, size, tokenizer.pad_id)
    with torch.no_grad():
        for layer in model.decoder_layers:
            layer.cross_attention.output.weight.mul_(4)  # type: ignore[union-attr, operator]
    ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    information = ModelInformation(size, size, *ids, "en", "de", 1)
    save_model_folder(folder, dict(model.named_parameters()), config, TokenizerFiles(tokenizer_file), information)
    return folder


def invoke(*arguments: object, lines: list[str] | None = None) -> Result:
    return CliRunner().invoke(
        app, [str(each) for each in arguments], input="".join(f"{line}\n" for line in lines or [])
    )


def said(*arguments: object, lines: list[str] | None = None) -> list[str]:
    """The lines that the verb writes to standard output."""
    result = invoke(*arguments, lines=lines)
    assert result.exception is None, result.exception
    return result.stdout.split("\n")[:-1]


def refused(*arguments: object, lines: list[str] | None = None) -> str:
    error = invoke(*arguments, lines=lines).exception
    assert isinstance(error, UserError), error
    return str(error)
