#!/usr/bin/env bash
# Emit the modules of this folder anew: `bash generated/regenerate.sh [another folder]`.
set -euo pipefail
folder=${1:-$(dirname "$0")}

rm -f "$folder"/mta_*.py
for kernel in 6,11 1,1; do
    for head_dim in 64 128; do
        python -m mtagen emit --kernel "$kernel" --head-dim "$head_dim" --dtype bf16 --target sm_90a --out "$folder"
    done
done
