"""A small model and what belongs beside it in a model folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.config.schema import ModelConfig
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.model.transformer import Transformer


@dataclass
class Saved:
    """A model folder and what was put into it."""

    folder: Path
    model: Transformer
    config: ModelConfig
    tokenizer_files: TokenizerFiles
    information: ModelInformation

    def save(self) -> None:
        save_model_folder(
            self.folder, dict(self.model.named_parameters()), self.config, self.tokenizer_files, self.information
        )


@pytest.fixture
def save_small_model(tmp_path: Path) -> Callable[..., Saved]:
    def save(shared: bool = True, **given: Any) -> Saved:
        torch.manual_seed(1)
        sizes: dict[str, Any] = dict(d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1, num_decoder_layers=2)
        config = ModelConfig(**{**sizes, **given}, shared_embeddings=shared)
        target_vocabulary = 16 if shared else 24
        model = Transformer(config, 16, target_vocabulary, pad_id=0)
        source, target = tmp_path / "trained.en.model", tmp_path / "trained.de.model"
        source.write_bytes(b"pieces of the source")
        target.write_bytes(b"pieces of the target")
        information = ModelInformation(
            source_vocabulary=16,
            target_vocabulary=target_vocabulary,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            source_language="en",
            target_language="de",
            step=1200,
        )
        files = TokenizerFiles(source, None if shared else target)
        saved = Saved(tmp_path / "run" / "model", model, config, files, information)
        saved.save()
        return saved

    return save
