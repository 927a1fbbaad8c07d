"""The run folder: what it holds, how its files are written and read, and who works on it. No torch, no Slurm."""
