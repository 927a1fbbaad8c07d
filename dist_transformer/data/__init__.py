"""Data pipeline from aligned text to micro-batches: sources, tokenizer and `prepare` write a prepared corpus once;
partition, windows, batching and loader read it, in the same order on any number of ranks."""
