"""Checkpoints that are whole or not there, and the model folder that is made of them."""
