#!/usr/bin/env bash
# Ranks on this machine, one per GPU (or a few on the CPU):
#   launch/local.sh NUM_RANKS CONFIG_OR_RUN_FOLDER [section.key=value ...]
# Ctrl-C, TERM and USR1 save and stop; after exit code 75 the same command resumes from there.
set -euo pipefail

num_ranks=${1:?usage: launch/local.sh NUM_RANKS CONFIG_OR_RUN_FOLDER [section.key=value ...]}
shift
exec "${DIST_TRANSFORMER_PYTHON:-python3}" -m dist_transformer train --ranks "$num_ranks" "$@"
