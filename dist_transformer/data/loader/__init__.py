"""From a prepared corpus to micro-batches: lanes, windows, token buckets and the position in them."""
