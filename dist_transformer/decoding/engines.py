"""Models opened for search: by our own search, or by CTranslate2 if it is installed."""

from collections.abc import Sequence
from pathlib import Path

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.decoding.loaded_model import Search, load_models, model_folder_of
from dist_transformer.distributed.group import device_of_rank
from dist_transformer.errors import UserError
from dist_transformer.interop.ctranslate2_export import is_exported
from dist_transformer.interop.model_folder import tokenizer_files
from dist_transformer.model.search_interface import Engine


def folders_of(engine: Engine, given: Sequence[Path]) -> list[Path]:
    """The model folders of the given model or run folders; for CTranslate2 also an exported folder. Raises UserError:
    one holds no model, or several are given for CTranslate2."""
    if engine == "ctranslate2" and len(given) > 1:
        raise UserError("--ensemble: CTranslate2 searches with one model; drop it, or take --engine torch")
    return [path if engine == "ctranslate2" and is_exported(path) else model_folder_of(path) for path in given]


def open_search(engine: Engine, folders: Sequence[Path], settings: DecodingConfig, plugin: str | None = None) -> Search:
    """Loads the models of `folders_of`; `plugin` as for `load_model_folder`. Raises UserError: a folder is incomplete,
    the models do not fit together, or CTranslate2 is missing or cannot do it."""
    if engine == "torch":
        return load_models(folders, settings, plugin)
    (folder,) = folders
    files = tokenizer_files(folder)
    tokenizer = Tokenizer.load(files.source, files.target)
    return Search(CTranslate2Searcher(folder, tokenizer.special, settings, device_of_rank()), tokenizer, [])
