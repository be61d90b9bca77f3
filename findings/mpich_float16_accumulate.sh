#!/usr/bin/env bash
# MPICH 5.0.2 with mpi4py 4.1.2 and NumPy 2.4.6: Win.Accumulate of float16 adds the bit patterns as integers.
#
# In a window 2.0 + 3.0 is -3.05e-05, because 0x4000 + 0x4200 is 0x8200. No call raises. REPLACE only moves bits,
# and is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
from mpi4py import MPI

window = MPI.Win.Allocate(2, 2, comm=MPI.COMM_SELF)
memory = np.frombuffer(window.tomemory(), np.float16)
window.Fence()
memory[0] = 2
window.Fence()
window.Accumulate(np.full(1, 3, np.float16), 0, op=MPI.SUM)
window.Fence()
bits = int(memory.view(np.uint16)[0])
window.Accumulate(np.full(1, 3, np.float16), 0, op=MPI.REPLACE)
window.Fence()
replaced = memory[0]
print("2.0 + 3.0:", np.uint16(bits).view(np.float16), "replaced by 3.0:", replaced)
window.Free()
if bits != 0x4000 + 0x4200 or replaced != 3:
    raise SystemExit("the behaviour has changed")
PROGRAM
