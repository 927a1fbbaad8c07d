"""Models opened to search with: by our own search, or by CTranslate2 where it is installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.ctranslate2_search import CTranslate2Searcher
from dist_transformer.decoding.loaded_model import device_of_rank, load_models, model_folder_of
from dist_transformer.errors import UserError
from dist_transformer.interop.ctranslate2_export import is_exported
from dist_transformer.interop.model_folder import tokenizer_files
from dist_transformer.model.search_interface import Engine, Searcher
from dist_transformer.model.transformer import Transformer


@dataclass(frozen=True)
class Search:
    """What translates.

    Attributes:
        models: of our own search; CTranslate2 shows none.
    """

    searcher: Searcher
    tokenizer: Tokenizer
    models: list[Transformer]


def folders_of(engine: Engine, given: Sequence[Path]) -> list[Path]:
    """The folders that are meant: model folders, those of runs, or for CTranslate2 an exported one.

    Raises:
        UserError: one holds no model, or there are several for CTranslate2.
    """
    if engine == "ctranslate2" and len(given) > 1:
        raise UserError("--ensemble: CTranslate2 searches with one model; drop it, or take --engine torch")
    return [path if engine == "ctranslate2" and is_exported(path) else model_folder_of(path) for path in given]


def open_search(engine: Engine, folders: Sequence[Path], settings: DecodingConfig) -> Search:
    """Loads the models of `folders_of`.

    Raises:
        UserError: a folder is not whole, the models do not go together, or CTranslate2 is not there or cannot do it.
    """
    if engine == "torch":
        loaded = load_models(folders)
        return Search(loaded.searcher(settings), loaded.tokenizer, loaded.models)
    (folder,) = folders
    files = tokenizer_files(folder)
    tokenizer = Tokenizer.load(files.source, files.target)
    searcher = CTranslate2Searcher(folder, **tokenizer.search_ids(), config=settings, device=device_of_rank())
    return Search(searcher, tokenizer, [])
