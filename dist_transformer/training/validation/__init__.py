"""Validation: token measures, translations and their scores, and early stopping."""
