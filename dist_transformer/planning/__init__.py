"""What a run will take before it is started: memory of a GPU, time of a step, hours to the end. Arithmetic, no torch."""
