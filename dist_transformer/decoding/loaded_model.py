"""Model folders loaded for translation: models on their device, and the tokenizer."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.cpu_packed import packed_for_decoding
from dist_transformer.decoding.search import TorchSearcher
from dist_transformer.decoding.translate import translate_lines
from dist_transformer.distributed.group import device_of_rank
from dist_transformer.errors import UserError
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.model.search_interface import Searcher
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.attempts import warn_of_age
from dist_transformer.run.folder import RunDir

# Threads of OpenMP, which loading starts, are gone in a forked process, where more than one would be waited for for ever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


@dataclass(frozen=True)
class Search:
    """A searcher with its tokenizer; `models`: the models of our own search, in eval mode, none for CTranslate2."""

    searcher: Searcher
    tokenizer: Tokenizer
    models: list[Transformer]


def model_folder_of(path: Path) -> Path:
    """The model folder of a model folder or run folder; of a run's, warns of its age."""
    for folder in (path, path / "model"):
        if (folder / "model.safetensors").is_file():
            warn_of_age(RunDir(path))
            return folder
    if (path / "model.bin").is_file():  # CTranslate2's; its adapter is not imported, because a served model lacks it
        raise UserError(
            f"{path}: a model exported to CTranslate2, which translate --engine ctranslate2 takes; the rest needs the model "
            "folder that it was exported from"
        )
    if path.parent.name == "checkpoints" and (step := path.name.removeprefix("step_")).isdecimal():
        made = f"dist-transformer average {RunDir(path.parent.parent).quoted} --step {int(step)} --output FOLDER"
        raise UserError(f"{path}: is a checkpoint, expected a model folder; a model is made of it by: {made}")
    run = RunDir(path).quoted if RunDir(path).config.is_file() else "RUN_FOLDER"
    raise UserError(
        f"{path}: holds no model (expected {path}/model.safetensors, or a run folder with model/). "
        f"A run writes it at its end; before that: dist-transformer average {run}"
    )


def load_models(folders: Sequence[Path], settings: DecodingConfig, plugin: str | None = None) -> Search:
    """Loads model folders for our own search, on a GPU if there is one; `plugin` as for `load_model_folder`. Raises
    UserError: a folder is incomplete, or the models have different tokenizers."""
    loaded, device = [load_model_folder(folder, plugin) for folder in folders], device_of_rank()
    for folder, other in zip(folders[1:], loaded[1:], strict=True):
        if other.tokenizer_files.read() != loaded[0].tokenizer_files.read():
            raise UserError(
                f"{folder}: its sentencepiece models are not those of {folders[0]}: models decode together only if their "
                "tokens are the same; train them with one tokenizer"
            )
    if plugin is not None and not any(each.config.plugin for each in loaded):
        raise UserError(f"--plugin {plugin}: {folders[0]} is a model of this program, without a plug-in; drop --plugin")
    files, information = loaded[0].tokenizer_files, loaded[0].information
    tokenizer = Tokenizer.load(files.source, files.target)
    vocabularies = (tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    expected = (information.source_vocabulary, information.target_vocabulary)
    if vocabularies != expected:
        raise UserError(
            f"{folders[0]}: its tokenizer has {vocabularies[0]} source and {vocabularies[1]} target pieces, its model "
            f"{expected[0]} and {expected[1]}: the sentencepiece model of another model lies there; put its own back"
        )
    models = [
        each.model.to(device) if each.config.plugin else packed_for_decoding(each.model.to(device)) for each in loaded
    ]
    return Search(TorchSearcher(models, tokenizer.special, settings, device), tokenizer, models)


class LoadedTranslator:
    """Translates lines with the model of a folder, on a GPU if there is one."""

    def __init__(self, folder: Path, settings: DecodingConfig) -> None:
        self._settings = settings.model_copy(update={"n_best": 1})
        self._search = load_models([folder], self._settings)

    def translate(self, lines: Iterable[str]) -> Iterator[str]:
        """Yields one translation per line, in order; empty lines stay empty."""
        for best, *_ in translate_lines(self._search.searcher, self._search.tokenizer, lines, self._settings):
            yield best.text
