"""Sentencepiece models: trained, taken, extended, and text to token ids."""
