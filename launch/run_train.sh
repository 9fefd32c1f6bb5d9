#!/usr/bin/env bash
# Train on this machine.
#
#   NGPU=2 CONFIG_FILE=train_configs/ar/debug.toml ./launch/run_train.sh [--section.key value ...]
#
# NGPU: processes on this machine (default 1). LOG_RANK: ranks whose log is shown (default 0).
set -euo pipefail

NGPU="${NGPU:-1}"
LOG_RANK="${LOG_RANK:-0}"
CONFIG_FILE="${CONFIG_FILE:-$(dirname "${BASH_SOURCE[0]}")/../train_configs/ar/debug.toml}"
# On a CPU, one thread a process unless said otherwise: processes that share cores slow each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

exec python -m torchtitan_ext.launch \
  --nproc-per-node "$NGPU" \
  --rdzv-backend c10d --rdzv-endpoint localhost:0 \
  --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
  -m torchtitan_ext.train --job.config_file "$CONFIG_FILE" "$@"
