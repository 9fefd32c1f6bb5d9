#!/usr/bin/env bash
# TDLM from end to end on two CPU processes: pretrain a masked diffusion model, record how it answers
# prompts, train temporal modules on that with the backbone frozen, and compare what decoding needs.
# "current" is the same adapter without memory, which sees the current forward alone.
#   OUT: folder of all four steps (default ./outputs/tdlm_demo). SEED: of data, weights and noise (default 0).
#   STEPS: updates of the temporal modules (default: the TOML's).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export NGPU=2
SEED="${SEED:-0}"
OUT="${OUT:-./outputs/tdlm_demo}"
BACKBONE="$OUT/backbone" TRAJECTORIES="$OUT/trajectories"
rm -rf "$OUT"

echo "== 1. the backbone"
CONFIG_FILE=train_configs/mdlm/arithmetic_cpu.toml ./launch/run_train.sh \
  --job.dump_folder "$BACKBONE" --debug.seed "$SEED"
CHECKPOINT="$(ls -d "$BACKBONE"/checkpoint/step-* | sort -t- -k2 -n | tail -1)"

echo "== 2. its trajectories"
OMP_NUM_THREADS=1 python -m torchtitan_ext.launch --nproc-per-node 2 \
  tools/make_trajectories.py "$CHECKPOINT" --prompts bounded_counter --count 1024 --response-length 49 \
  --batch-size 64 --seed "$SEED" --out "$TRAJECTORIES"

echo "== 3. temporal modules: with the full history, and without memory"
for window in full current; do
  CONFIG_FILE=train_configs/tdlm/arithmetic_cpu.toml ./launch/run_train.sh \
    --job.dump_folder "$OUT/$window" --tdlm.window "$window" --debug.seed "$SEED" \
    --dataloader.dataset_path "$TRAJECTORIES" --checkpoint.initial_load_path "$CHECKPOINT" \
    ${STEPS:+--training.steps "$STEPS"}
done

echo "== 4. the comparison"
evaluate() {
  echo "-- $1: $2"
  OMP_NUM_THREADS=2 python tools/evaluate.py "$OUT/$1" --task bounded_counter --lengths 48 --samples 256 \
    --sweep "$2" "${@:3}"
}
evaluate backbone "policy=one_token"
evaluate full "policy=threshold;tau=0.9,0.95,0.98;window=off,full" --png "$OUT/frontier.png"
evaluate full "policy=threshold;tau=0.98;window=current,1,3,5"
evaluate current "policy=threshold;tau=0.9,0.95,0.98"
