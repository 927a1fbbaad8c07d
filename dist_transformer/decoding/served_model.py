"""How MLflow loads a model folder and translates with it: the loader that a logged model names (`loader_module`).

MLflow calls `_load_pyfunc(folder, settings)`; `settings` is the section `decoding` of the run that trained the model, and
whoever loads it may change them: `mlflow.pyfunc.load_model(uri, model_config={"beam_size": 1})`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.loaded_model import LoadedTranslator


class ServedModel:
    """What MLflow holds; every way of asking for a prediction ends in `predict`."""

    def __init__(self, translator: LoadedTranslator) -> None:
        self._translator = translator

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """One translation a line, in order; empty lines, and missing ones of a table, stay empty.

        `model_input`: a pandas table with one column, or anything that lists strings.
        """
        return list(self._translator.translate(map(_line, _column(model_input))))


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any] | None = None) -> ServedModel:
    """The name and the arguments are MLflow's."""
    return ServedModel(LoadedTranslator(Path(data_path), DecodingConfig(**(model_config or {}))))


def _column(model_input: Any) -> Iterable[Any]:
    if hasattr(model_input, "iloc"):  # a pandas table, or one column of it
        model_input = model_input.iloc[:, 0] if model_input.ndim == 2 else model_input
    return [model_input] if isinstance(model_input, str) else list(model_input)


def _line(value: Any) -> str:
    return value if isinstance(value, str) else ""
