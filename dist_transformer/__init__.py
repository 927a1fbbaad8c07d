"""Dist Transformer: trains the encoder-decoder Transformer of Vaswani et al. (2017) on Slurm clusters."""

__version__ = "0.1.0"
