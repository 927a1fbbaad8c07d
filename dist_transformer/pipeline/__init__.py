"""Pipelines: a small graph of nodes that are verbs of this program, with files and models that pass between them."""
