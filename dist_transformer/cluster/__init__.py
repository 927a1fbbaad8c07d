"""Slurm: checks and submits jobs, keeps the code they run, and decides when a stopped job is requeued.

Nothing here imports torch, so that it works on a login node; only `slurm.py` calls Slurm's commands.
"""
