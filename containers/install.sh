#!/usr/bin/env bash
# Installs the program into the Python of an image, in three steps so that an image has a layer for each: torch changes
# rarely, the program often. Both containers/Dockerfile and containers/dist-transformer.def call it.
#   containers/install.sh torch cuda|cpu
#   containers/install.sh dependencies
#   containers/install.sh program
set -euo pipefail
cd "$(dirname "$0")/.."
install=(python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action ignore
  --constraint constraints.txt)
export DS_BUILD_OPS=0  # DeepSpeed's own kernels need a compiler, and are not used

case "${1:-}" in
  torch)
    # PyPI's torch is the CUDA build, with its CUDA libraries; the driver is the host's.
    case "${2:-}" in
      cuda)
        "${install[@]}" torch
        # Triton compiles what starts the kernels for GPUs; without ibverbs NCCL takes TCP, and does not say so.
        apt-get update --quiet
        apt-get install --yes --quiet --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers
        rm -rf /var/lib/apt/lists/* ;;
      cpu) "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu torch ;;
      *) echo "expected the variant cuda or cpu; got '${2:-}'" >&2; exit 2 ;;
    esac ;;
  dependencies)
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      | "${install[@]}" --requirement /dev/stdin ;;
  program) "${install[@]}" --no-deps . ;;
  *) echo "expected a step: torch, dependencies or program; got '${1:-}'" >&2; exit 2 ;;
esac
