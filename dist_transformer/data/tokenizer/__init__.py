"""Sentencepiece models: training, loading, extension, and conversion of text to token ids."""
