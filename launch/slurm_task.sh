#!/usr/bin/env bash
# What srun starts once for each rank: Slurm's names become the names that the trainer reads.
#   srun launch/slurm_task.sh VERB ARGUMENTS     such as: train CONFIG. MASTER_ADDR and MASTER_PORT: the batch script's
set -euo pipefail

export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS" LOCAL_RANK="$SLURM_LOCALID"
# Nodes may have different numbers of ranks: "2(x3),1" is 2, 2, 2, 1.
node=0
IFS=, read -ra groups <<< "${SLURM_STEP_TASKS_PER_NODE:-$SLURM_NTASKS}"
for group in "${groups[@]}"; do
  nodes=1
  if [[ "$group" =~ \(x([0-9]+)\)$ ]]; then nodes=${BASH_REMATCH[1]}; fi
  export LOCAL_WORLD_SIZE="${group%%(*}"
  node=$((node + nodes))
  if [ "$node" -gt "${SLURM_NODEID:-0}" ]; then break; fi
done

# The trainer saves by itself when the end of the job is near, should the signal not come. Slurm says when since 23.02.
if [[ "${SLURM_JOB_END_TIME:-}" =~ ^[1-9][0-9]*$ ]]; then
  export DIST_TRANSFORMER_END_TIME=$((SLURM_JOB_END_TIME - ${DIST_TRANSFORMER_SIGNAL_SECONDS:-180}))
fi

# Slurm signals every process of the step, this shell too: it stays, and the rank answers.
trap : USR1 USR2 TERM INT
code=0
"${DIST_TRANSFORMER_PYTHON:-python3}" -u -m dist_transformer "$@" || code=$?
if [ "$code" != 0 ] && [ -n "${DIST_TRANSFORMER_FIRST_EXIT:-}" ]; then
  # Only the first to fail writes: the others follow because of it.
  (set -o noclobber; echo "$code ${SLURMD_NODENAME:-?}" > "$DIST_TRANSFORMER_FIRST_EXIT") 2>/dev/null || :
fi
exit "$code"
