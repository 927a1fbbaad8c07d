"""The name by which models that version 0.1 logged to MLflow import their loader."""

from dist_transformer.decoding.served_model import _load_pyfunc

__all__ = ["_load_pyfunc"]
