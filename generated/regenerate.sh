#!/usr/bin/env bash
# Emit the files of this folder anew: `bash generated/regenerate.sh [another folder]`. Old files stay if emitting fails.
set -euo pipefail
folder=${1:-$(dirname "$0")}
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

emit() {  # kernel, backend
    for head_dim in 64 128; do
        python -m mtagen emit --kernel "$1" --head-dim "$head_dim" --dtype bf16 --target sm_90a --backend "$2" --out "$new"
    done
}

pipeline() {  # backend, head dim, stages
    python -m mtagen emit --backend "$1" --head-dim "$2" "${@:3}" --dtype bf16 --target sm_90a --out "$new"
}

{
    emit 6,11 triton
    emit 1,1 triton
    emit 6,11 cuda
    pipeline triton 64 --kernel 6,11 --mixed-heads 16 --post-kernel 6,11 --post-mixed-heads 16
    pipeline triton 64 --kernel none --mixed-heads 16 --post-mixed-heads 16
    pipeline cuda 128 --kernel 6,11 --mixed-heads 16 --post-kernel 6,11 --post-mixed-heads 16
} > /dev/null
rm -f "$folder"/mta_*
mv "$new"/mta_* "$folder"
