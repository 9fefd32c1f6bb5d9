#!/usr/bin/env bash
# Train on several machines: run this on each of them with the same environment.
#
#   NNODES=2 NGPU=8 MASTER_ADDR=node0 CONFIG_FILE=X.toml ./launch/run_multinode.sh [--section.key value ...]
#   ... ./launch/run_multinode.sh --dry-run    # print the environment and the command, run nothing
#
# Required:
#   NNODES           machines of the run
#   NGPU             processes on this machine, one a GPU (or NPROC_PER_NODE)
#   CONFIG_FILE      the TOML
#   MASTER_ADDR      address or name of the first machine, as the others reach it (or RDZV_ENDPOINT,
#                    host:port); not needed for NNODES=1
# Optional:
#   MASTER_PORT      29400; a free port of the first machine
#   RDZV_ID          the job's name, equal on all machines ($SLURM_JOB_ID, else torchtitan_ext)
#   RDZV_TIMEOUT     300; seconds in which all machines must come
#   MAX_RESTARTS     0; restarts from the newest whole checkpoint after a process died
#   STOP_GRACE       240; seconds to finish the step and save after SIGTERM or SIGUSR1
#   LOG_RANK         0; local ranks whose log is shown, such as 0,1
#   LOG_DIR          folder for every process's log (none)
#   LOCAL_ADDR       this machine's address for the others (that of the way to MASTER_ADDR)
#   NUMA_BINDING     node, socket, exclusive or core-complex: bind each process near its GPU (needs numactl)
#   OMP_NUM_THREADS  1
#   PYTHON           python
#
# Exit codes: 0 trained to the end, 1 failed, 2 refused its input, 75 stopped on request with a
# checkpoint (start again to go on), 76 stopped without one, 128+n ended at once by signal n.
set -euo pipefail

DRY_RUN=0
if [[ "${1:-}" == "--dry-run" ]]; then
  DRY_RUN=1
  shift
fi

missing=0
need() { # name, what it is
  if [[ -z "${!1:-}" ]]; then
    echo "error: $1 is not set: $2" >&2
    missing=1
  fi
}

NGPU="${NGPU:-${NPROC_PER_NODE:-}}"
need NNODES "the number of machines of the run"
need NGPU "the number of processes on this machine, one a GPU"
need CONFIG_FILE "the TOML to train from"
MASTER_PORT="${MASTER_PORT:-29400}"
if [[ "${NNODES:-}" == 1 ]]; then
  RDZV_ENDPOINT="${RDZV_ENDPOINT:-localhost:0}" # any free port
elif [[ -z "${RDZV_ENDPOINT:-}" ]]; then
  need MASTER_ADDR "the first machine's address, as the others reach it (or RDZV_ENDPOINT=host:port)"
  RDZV_ENDPOINT="${MASTER_ADDR:-}:$MASTER_PORT"
fi
RDZV_TIMEOUT="${RDZV_TIMEOUT:-300}"
MAX_RESTARTS="${MAX_RESTARTS:-0}"
for name in NNODES NGPU RDZV_TIMEOUT MAX_RESTARTS; do
  if [[ -n "${!name:-}" && ! "${!name}" =~ ^[0-9]+$ ]]; then
    echo "error: $name = '${!name}': must be a whole number" >&2
    missing=1
  fi
done
if ((missing)); then
  exit 2
fi

# Where torch finds this package when it is not installed.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# One thread a process unless said otherwise: processes that share cores slow each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Segments that grow: less memory lost to fragments when lengths vary.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export STOP_GRACE="${STOP_GRACE:-240}"

command=(
  "${PYTHON:-python}" -m torchtitan_ext.launch
  --nnodes "$NNODES" --nproc-per-node "$NGPU"
  --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT"
  --rdzv-id "${RDZV_ID:-${SLURM_JOB_ID:-torchtitan_ext}}"
  --rdzv-conf "join_timeout=$RDZV_TIMEOUT"
  --max-restarts "$MAX_RESTARTS"
  --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3
)
[[ -z "${LOG_DIR:-}" ]] || command+=(--log-dir "$LOG_DIR")
[[ -z "${LOCAL_ADDR:-}" ]] || command+=(--local-addr "$LOCAL_ADDR")
[[ -z "${NUMA_BINDING:-}" ]] || command+=(--numa-binding "$NUMA_BINDING")
command+=(-m torchtitan_ext.train --job.config_file "$CONFIG_FILE" "$@")

if ((DRY_RUN)); then
  for name in PYTHONPATH OMP_NUM_THREADS PYTORCH_ALLOC_CONF STOP_GRACE; do
    printf 'export %s=%q\n' "$name" "${!name}"
  done
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
