#!/usr/bin/env bash
# What srun starts once for each rank: Slurm's names become the names that the trainer reads.
# Arguments: those of `dist-transformer train`. MASTER_ADDR and MASTER_PORT come from the batch script.
set -euo pipefail

export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
export LOCAL_WORLD_SIZE=$(((SLURM_NTASKS + SLURM_NNODES - 1) / SLURM_NNODES))

# Slurm signals every process of the step, this shell too: it stays, and the rank answers.
trap : USR1 USR2 TERM INT
code=0
"${DIST_TRANSFORMER_PYTHON:-python3}" -u -m dist_transformer train "$@" || code=$?
if [ "$code" != 0 ] && [ -n "${DIST_TRANSFORMER_FIRST_EXIT:-}" ]; then
  # Only the first to fail writes: the others follow because of it.
  (set -o noclobber; echo "$code" > "$DIST_TRANSFORMER_FIRST_EXIT") 2>/dev/null || :
fi
exit "$code"
