"""A model folder ready to translate: model on its device, and tokenizer."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from dist_transformer.config.models import DecodingConfig
from dist_transformer.data.tokenizer import Tokenizer
from dist_transformer.decoding.translate import translate_lines
from dist_transformer.errors import UserError
from dist_transformer.interop.model_folder import load_model_folder


def model_folder_of(path: Path) -> Path:
    """The model folder that is meant by a model folder or a run folder."""
    for folder in (path, path / "model"):
        if (folder / "model.safetensors").is_file():
            return folder
    raise UserError(
        f"{path}: holds no model (expected {path}/model.safetensors, or a run folder with model/). "
        "A run writes it at its end; before that: dist-transformer average RUN_FOLDER"
    )


class LoadedTranslator:
    """Translates lines with the model of a folder, on a GPU where there is one."""

    def __init__(self, folder: Path, settings: DecodingConfig) -> None:
        loaded = load_model_folder(folder)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = loaded.model.to(self._device)
        self._tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
        self._settings = settings
        self.information = loaded.information
        vocabularies = (self._tokenizer.source_vocabulary, self._tokenizer.target_vocabulary)
        expected = (loaded.information.source_vocabulary, loaded.information.target_vocabulary)
        if vocabularies != expected:
            raise UserError(
                f"{folder}: its tokenizer has {vocabularies[0]} source and {vocabularies[1]} target pieces, its model "
                f"{expected[0]} and {expected[1]}: the sentencepiece model of another model lies there; put its own back"
            )

    def translate(self, lines: Iterable[str]) -> Iterator[str]:
        """One translation a line, in order; empty lines stay empty."""
        return translate_lines(self._model, self._tokenizer, lines, self._settings, self._device)
