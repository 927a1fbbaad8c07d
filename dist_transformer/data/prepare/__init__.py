"""Preparation of a corpus from text, once, by any number of processes."""
