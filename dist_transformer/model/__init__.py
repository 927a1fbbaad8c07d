"""The encoder-decoder of Vaswani et al. (2017): attention, layers, the whole network, and its loss."""
