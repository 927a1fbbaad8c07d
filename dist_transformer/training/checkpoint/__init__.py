"""Checkpoints, each complete or absent, and the model folder made of them."""
