"""From text to a prepared corpus, once, by any number of processes."""
