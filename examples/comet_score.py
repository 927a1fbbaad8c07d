"""COMET as a measure of translations: a score by a trained model (pip install unbabel-comet).

validation: {plugin: "examples/comet_score.py:score", metric: plugin}
dist-transformer evaluate runs/mine --metric-plugin examples/comet_score.py:score
"""

import logging
from pathlib import Path

import torch

MODEL = "Unbabel/wmt22-comet-da"
"""A model of the package's makers, or a checkpoint file. It is a pickle, which can run any code: name only one you trust."""
BATCH_SENTENCES = 16

handlers, level = list(logging.root.handlers), logging.root.level
from comet import download_model, load_from_checkpoint  # noqa: E402

logging.root.handlers[:] = handlers  # the package configures logging on import: each line would appear twice
logging.root.setLevel(level)
model = load_from_checkpoint(MODEL if Path(MODEL).is_file() else download_model(MODEL)).eval()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def score(hypotheses, references, sources) -> float:
    """The mean score of the sentences, with most models 0 to 1. Between its calls the model is in the CPU's memory."""
    texts = zip(sources, hypotheses, references, strict=True)
    samples = [{"src": source, "mt": hypothesis, "ref": reference} for source, hypothesis, reference in texts]
    model.to(device)
    total = 0.0
    for first in range(0, len(samples), BATCH_SENTENCES):
        # Not `predict`: that would start its own trainer, with ranks and signal handlers.
        inputs = model.prepare_for_inference(samples[first : first + BATCH_SENTENCES])
        total += float(model.predict_step(moved(inputs)).scores.double().sum())
    model.to("cpu")
    return total / len(samples)


def moved(inputs):
    """Moves the tensors in tuples and dictionaries to the device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, dict):
        return {key: moved(value) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(moved(value) for value in inputs)
    return inputs
