#!/usr/bin/env bash
# Command that srun starts once for each rank: sets the variables that the trainer reads from Slurm's.
#   srun launch/slurm_task.sh VERB ARGUMENTS     such as: train CONFIG. The batch script sets MASTER_ADDR, MASTER_PORT
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

# Slurm signals every process of the step, this shell too: it keeps running, and the rank handles the signal.
trap : USR1 USR2 TERM INT
code=0 node=${SLURMD_NODENAME:-?}
"${DIST_TRANSFORMER_PYTHON:-python3}" -u -m dist_transformer "$@" || code=$?
# A rank that only lost another, or waited for it, exits with 100 more than 1 or 70: its node is not to blame.
if [ "$code" = 101 ] || [ "$code" = 170 ]; then code=$((code - 100)) node=; fi
if [ "$code" != 0 ] && [ -n "${DIST_TRANSFORMER_FIRST_EXIT:-}" ]; then
  # Only the first rank to fail writes: the others fail because of it.
  (set -o noclobber; echo "$code $node" > "$DIST_TRANSFORMER_FIRST_EXIT") 2>/dev/null || :
fi
exit "$code"
