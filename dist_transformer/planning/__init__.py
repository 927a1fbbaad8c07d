"""Estimates before a run is started: memory of a GPU, time of a step, hours to the end. Arithmetic without torch."""
