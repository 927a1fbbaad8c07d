"""Loading of a prepared corpus as micro-batches: lanes, windows, token buckets and the position in them."""
