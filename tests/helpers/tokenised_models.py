"""Model folders with a real tokenizer and random weights, none of them at a value that hides a mistake."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from marian_folders import demo_sentences

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.interop.model_folder import (
    LoadedModel,
    ModelInformation,
    TokenizerFiles,
    load_model_folder,
    save_model_folder,
)
from dist_transformer.model.transformer import Transformer


def make_model_folder(folder: Path, *, is_shared: bool = True, noise: float = 0.3, **given: Any) -> LoadedModel:
    """A model of English to German, loaded from the folder; `noise` is added to its initial values."""
    files = demo_tokenizers(folder.parent, is_shared)
    tokenizer = Tokenizer.load(files.source, files.target)
    sizes = dict(d_model=16, d_ff=24, num_heads=4, num_encoder_layers=2, num_decoder_layers=3)
    config = ModelConfig(**{**sizes, **given, "shared_embeddings": is_shared})
    torch.manual_seed(1)
    model = Transformer(config, tokenizer.source_vocabulary, tokenizer.target_vocabulary, tokenizer.pad_id)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    if config.positions == "marian":
        model.keep_start_at_zero(tokenizer.bos_id)
    information = ModelInformation(
        source_vocabulary=tokenizer.source_vocabulary,
        target_vocabulary=tokenizer.target_vocabulary,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        source_language="en",
        target_language="de",
        step=1,
    )
    save_model_folder(folder, dict(model.named_parameters()), config, files, information)
    return load_model_folder(folder)


def demo_tokenizers(folder: Path, is_shared: bool) -> TokenizerFiles:
    """One model of both languages, or two of other sizes."""
    names = ["shared"] if is_shared else ["source", "target"]
    for name in names:
        (folder / f"{name}.model").write_bytes(_trained(name))
    paths = [folder / f"{name}.model" for name in names]
    return TokenizerFiles(paths[0], None if is_shared else paths[1])


@functools.cache
def _trained(name: str) -> bytes:
    source, target = demo_sentences(300)
    sentences, size = {"shared": (source + target, 200), "source": (source, 120), "target": (target, 136)}[name]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trained.model"
        train_tokenizer(iter(sentences), TokenizerConfig(vocabulary_size=size), path)
        return path.read_bytes()
