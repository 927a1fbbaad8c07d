#!/usr/bin/env bash
# Ranks across machines without Slurm, by torchrun. Start it on every machine, with its own NODE_RANK:
#   NUM_NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDR=first-machine launch/torchrun.sh CONFIG [section.key=value ...]
# USR1 or TERM to one torchrun saves and stops. torchrun then exits 1 if the trainer exits 75 (it keeps no exit codes):
# look at the log, and start the same command again to resume.
set -euo pipefail

# The rendezvous is static: c10d would not keep rank 0 on the first machine. Without the list of signals torchrun dies
# of USR1 itself; without the time-out it kills the ranks 30 s after a signal, in the middle of a slow save.
# No restarts after a failure, which are left to the user: restarted ranks would have to agree on them first.
exec "${DIST_TRANSFORMER_PYTHON:-python3}" -m torch.distributed.run \
  --nnodes "${NUM_NODES:-1}" \
  --node-rank "${NODE_RANK:-0}" \
  --nproc-per-node "${RANKS_PER_NODE:-1}" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${MASTER_PORT:-29400}" \
  --max-restarts 0 \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
  --shutdown-timeout 600 \
  -m dist_transformer train "$@"
