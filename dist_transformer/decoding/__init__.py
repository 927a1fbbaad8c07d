"""From a trained model to text and scores: beam search, translation of lines in order, sacreBLEU."""
