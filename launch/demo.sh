#!/usr/bin/env bash
# The demonstration from end to end on two CPU processes: T2MLR and the same transformer without
# recurrence learn to track the state of a permutation group, and are compared in and beyond the
# trained length.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export NGPU=2
OUT="${OUT:-./outputs/demo}"
rm -rf "$OUT"

for run in s3_cpu s3_cpu_transformer; do
  echo "== train $run on two processes"
  CONFIG_FILE="train_configs/t2mlr/$run.toml" ./launch/run_train.sh --job.dump_folder "$OUT/$run"
done

echo "== compare at 1 to 32 elements; 16 is the longest in training"
python tools/compare.py lengths "$OUT/s3_cpu" "$OUT/s3_cpu_transformer" \
  --task group_retrieval --lengths 1:32 --at 16,32 --png "$OUT/s3.png" --csv "$OUT/s3.csv"
