"""Loader by which MLflow loads a model folder and translates with it: the `loader_module` of logged models, of all versions.

MLflow calls `_load_pyfunc(folder, settings)`; `settings` is the section `decoding` of the run that trained the model,
and can be changed on loading: `mlflow.pyfunc.load_model(uri, model_config={"beam_size": 1})`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.decoding.loaded_model import LoadedTranslator


class ServedModel:
    """The model object for MLflow, which calls `predict` for every kind of prediction."""

    def __init__(self, translator: LoadedTranslator) -> None:
        self._translator = translator

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """Translates each line, in order; empty lines, and missing values of a table, stay empty.

        `model_input`: a pandas table with one column, or an iterable of strings.
        """
        if hasattr(model_input, "iloc"):  # a pandas table, or one column of it
            model_input = model_input.iloc[:, 0] if model_input.ndim == 2 else model_input
        lines = [model_input] if isinstance(model_input, str) else model_input
        return list(self._translator.translate(line if isinstance(line, str) else "" for line in lines))


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any] | None = None) -> ServedModel:
    """Entry point of MLflow, which prescribes its name and arguments."""
    return ServedModel(LoadedTranslator(Path(data_path), DecodingConfig(**(model_config or {}))))
