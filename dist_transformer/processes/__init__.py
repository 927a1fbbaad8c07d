"""Processes of one machine: the ranks that are started, signals, stop requests and stacks. No torch."""
