"""Processes of one machine: starting the ranks, signals, stop requests and stacks. No torch."""
