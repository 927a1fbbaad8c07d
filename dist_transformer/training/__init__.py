"""Training: the step (engine), the loop around it, learning-rate schedules, validation and checkpoints."""
