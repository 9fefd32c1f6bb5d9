#!/usr/bin/env bash
# The main job from end to end on two CPU processes: train, stop, resume, generate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export NGPU=2 CONFIG_FILE=train_configs/ar/stdlib_cpu.toml
OUT="${OUT:-./outputs/demo}"
rm -rf "$OUT"

echo "== train on two processes with FSDP2 and stop at step 100"
./launch/run_train.sh --job.dump_folder "$OUT" --training.steps 100

echo "== the same command goes on from the checkpoint to step 200"
./launch/run_train.sh --job.dump_folder "$OUT"

echo "== generate from the last checkpoint"
python tools/generate.py "$OUT" --prompt "def " --max-new-tokens 200 --temperature 0.7 --seed 1
