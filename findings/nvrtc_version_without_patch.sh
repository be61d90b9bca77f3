#!/usr/bin/env bash
# nvidia-cuda-nvrtc-cu12 12.9.41 and 12.9.86 with cuda-bindings 12.9.10: nvrtcVersion tells both patches as (12, 9).
#
# Both libraries have 106,244,480 bytes, too. So a cache of compiled kernels whose key has nvrtcVersion keeps the code of
# the older patch after an upgrade. The numbers of the builds in the libraries differ: they are in the last 4 KiB of these
# two, and in the first 4 KiB of NVRTC 13.0.88.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat >"$folder/program.py" <<'PROGRAM'
import hashlib
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.pathfinder import load_nvidia_dynamic_lib

version = nvrtc.nvrtcVersion()[1:]
library = Path(load_nvidia_dynamic_lib("nvrtc").abs_path).read_bytes()
print(version[0], version[1], len(library), hashlib.sha256(library[-4096:]).hexdigest())
PROGRAM
for patch in 12.9.41 12.9.86; do
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    cuda-bindings==12.9.10 cuda-pathfinder==1.9.1 nvidia-cuda-nvrtc-cu12==$patch
  "$folder/venv/bin/python" "$folder/program.py" | tee -a "$folder/lines"
done
test "$(cut -d' ' -f1-3 "$folder/lines" | sort -u)" = "12 9 106244480" &&
  test "$(cut -d' ' -f4 "$folder/lines" | sort -u | wc -l)" = 2 ||
  { echo "the behaviour has changed"; exit 1; }
