"""Adapter of COMET (package unbabel-comet, not installed with this one): a score by a trained model."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dist_transformer.errors import UserError

BATCH_SENTENCES = 16
MAKERS = "Unbabel/"


class CometScorer:
    """A COMET model in CPU memory that scores on a GPU if there is one.

    Args:
        name: a model of the package's authors (Unbabel/wmt22-comet-da), or a checkpoint file. The package unpickles the
            file, which can execute code, so a name in a YAML file must not fetch other models.

    Raises:
        UserError: the package or the model is missing, or the model is by other authors.
    """

    def __init__(self, name: str) -> None:
        if not (name.startswith(MAKERS) or Path(name).is_file()):
            raise UserError(
                f"COMET model {name!r} (validation.comet, --comet): expected a model of the package's makers, such as "
                f"{MAKERS}wmt22-comet-da, or a checkpoint file that is there: a model is a pickle, which can run anything when "
                "it is loaded; one of others that you trust, download yourself and give its file"
            )
        try:
            with _logging_kept():
                from comet import download_model, load_from_checkpoint
        except ImportError as error:
            raise UserError(
                f"COMET scores need the package unbabel-comet, which cannot be imported ({error}): "
                "pip install unbabel-comet, or continue without (validation.comet, --comet)"
            ) from error
        try:
            file = name if Path(name).is_file() else download_model(name)
            self._model: Any = load_from_checkpoint(file).eval()
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the COMET model {name} cannot be loaded ({type(error).__name__}: {error}): expected a name of the "
                "package's models, such as Unbabel/wmt22-comet-da, or a checkpoint file"
            ) from error
        self.name = name
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @torch.no_grad()
    def score(self, sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> float:
        """The mean score of the sentences; with most models 0 to 1."""
        samples = [
            {"src": source, "mt": translation, "ref": reference}
            for source, translation, reference in zip(sources, translations, references, strict=True)
        ]
        model = self._model.to(self._device)
        total = 0.0
        for first in range(0, len(samples), BATCH_SENTENCES):
            # Not `predict`: that would start its own trainer, with ranks and signal handlers.
            inputs = model.prepare_for_inference(samples[first : first + BATCH_SENTENCES])
            total += float(model.predict_step(_moved(inputs, self._device)).scores.double().sum())
        self._model = model.to("cpu")
        return total / len(samples)


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Restores logging, which the package configures for the process on import: our lines would appear twice."""
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def _moved(inputs: Any, device: torch.device) -> Any:
    """Moves the tensors in tuples and dictionaries to the device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, dict):
        return {key: _moved(value, device) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(_moved(value, device) for value in inputs)
    return inputs
