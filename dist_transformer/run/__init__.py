"""The run folder: its files, how they are written and read, and its lock. No torch, no Slurm."""
