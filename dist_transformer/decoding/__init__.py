"""Decoding with trained models: beam search, translation of lines in order, scores by sacreBLEU."""
