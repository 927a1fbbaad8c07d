#!/usr/bin/env bash
# Measures the nodes of a Slurm job before it trains; called by the batch scripts, inside the job:
#   launch/preflight.sh PYTHON RUN_FOLDER FOLDER SECONDS TOLERANCE [srun option ...] -- [what starts each rank ...]
# FOLDER gets the measurements of each rank and report.json. PYTHON, of the batch script, needs no torch. The table is
# printed on standard output. Exit codes: 0 no node to exclude, 3 FOLDER/exclude lists some, 1 nothing was measured.
set -euo pipefail

python=$1 run_folder=$2 folder=$3 seconds=$4 tolerance=$5
shift 5
srun_options=()
while [ "${1:---}" != -- ]; do srun_options+=("$1"); shift; done
[ $# = 0 ] || shift # the --; the rest is put before the command of each rank
launch=$(cd "$(dirname "$0")" && pwd -P)
mkdir -p "$folder"
rm -f "$folder"/rank_*.json "$folder/exclude"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${MASTER_ADDR:-${nodes[0]}}"
export MASTER_PORT=$((${MASTER_PORT:-10000 + SLURM_JOB_ID * 7 % 20000} + 3)) # the trainer's port stays free
unset DIST_TRANSFORMER_FIRST_EXIT # a rank's end here says nothing about the training
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # no stack for each rank that waits in vain: see the report

# A bad node must not hide the others: no rank ends because another one failed. Ranks end by themselves after their
# time limit; timeout ends srun if one cannot. In the background, so that a signal to this script is forwarded at once.
timeout --kill-after=10 "$((seconds + 5))" srun --kill-on-bad-exit=0 --wait=0 --label --job-name=preflight \
  ${srun_options[@]+"${srun_options[@]}"} "$@" "$launch/slurm_task.sh" preflight \
  --folder "$folder" --run-folder "$run_folder" --seconds "$seconds" </dev/null &
step=$!
trap 'kill "$step" 2>/dev/null || :' TERM INT
while kill -0 "$step" 2>/dev/null; do wait "$step" || :; done

exec "$python" -m dist_transformer.preflight.report "$folder" "$tolerance" "${nodes[@]}"
