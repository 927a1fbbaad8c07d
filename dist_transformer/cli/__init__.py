"""The command line, which connects the parts. One file per verb, with heavy imports inside functions."""
