#!/usr/bin/env bash
# Ranks across machines without Slurm, by DeepSpeed's launcher: needs ssh without a password to every machine, and the
# same folders and Python there. Start it once, on the first machine:
#   launch/hostfile.sh HOSTFILE CONFIG_OR_RUN_FOLDER [section.key=value ...]
# HOSTFILE: a line `name slots=8` for each machine, slots being its ranks. To save and stop, create the file `stop` in
# the run folder: this launcher dies of USR1, and kills the ranks 30 s after TERM, in the middle of a slow save.
set -euo pipefail

hostfile=${1:?usage: launch/hostfile.sh HOSTFILE CONFIG_OR_RUN_FOLDER [section.key=value ...]}
shift
exec "${DIST_TRANSFORMER_PYTHON:-python3}" -m deepspeed.launcher.runner \
  --hostfile "$hostfile" \
  --master_port "${MASTER_PORT:-29400}" \
  --no_local_rank \
  --module dist_transformer train "$@"
