#!/usr/bin/env bash
# Ranks across machines without Slurm, by DeepSpeed's launcher: needs pdsh here, ssh without a password to every
# machine, and the same folders and Python there. Start it once, on the first machine:
#   launch/hostfile.sh HOSTFILE CONFIG_OR_RUN_FOLDER [section.key=value ...]
# HOSTFILE: a line `name slots=8` for each machine, slots being its ranks. To save and stop, create the file `stop` in
# the run folder: this launcher dies of USR1, and kills the ranks 30 s after TERM, in the middle of a slow save.
set -euo pipefail

hostfile=${1:?usage: launch/hostfile.sh HOSTFILE CONFIG_OR_RUN_FOLDER [section.key=value ...]}
shift
# DeepSpeed would only warn, and train on this machine alone.
[ -f "$hostfile" ] || {
  echo "launch/hostfile.sh: $hostfile: no such file; expected lines like: name slots=8" >&2
  exit 2
}
# The launcher passes arguments to the other machines between double quotes, where a shell still reads these.
for argument in "$@"; do
  case $argument in
    *['"$`\\']*) echo "launch/hostfile.sh: no \" \$ \` or \\ in arguments, got $argument; put it into the YAML file" >&2; exit 2 ;;
  esac
done
exec "${DIST_TRANSFORMER_PYTHON:-python3}" -m deepspeed.launcher.runner \
  --hostfile "$hostfile" \
  --master_port "${MASTER_PORT:-29400}" \
  --no_local_rank \
  --module dist_transformer train "$@"
