#!/usr/bin/env bash
# MPICH 5.0.2: Isendrecv_replace of a datatype with gaps receives wrong data; Sendrecv_replace of the same buffer is right.
#
# Each rank has 100 elements of int32 at every second place, as Create_vector and Create_resized describe them, and sends
# them to the other rank. The received elements land at the right places, and the gaps stay as they are, but the elements
# themselves are every second one of what the sender has sent: 0, 2, 4 and so on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 mpich==5.0.2
cat >"$folder/program.py" <<'PROGRAM'
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
other, spaced = 1 - comm.rank, MPI.INT32_T.Create_vector(1, 1, 2).Create_resized(0, 8).Commit()
for name in ("Sendrecv_replace", "Isendrecv_replace"):
    memory = np.full(200, -1, np.int32)
    memory[::2] = 1000 * comm.rank + np.arange(100)
    request = getattr(comm, name)([memory, 100, spaced], other, 7, other, 7)
    if request is not None:
        request.Wait()
    if comm.rank == 0:
        print(f"{name}: {memory[:8].tolist()}", flush=True)
PROGRAM
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" "$folder/program.py" </dev/null | tee "$folder/lines"
diff "$folder/lines" - <<'EXPECTED' || { echo "the behaviour has changed"; exit 1; }
Sendrecv_replace: [1000, -1, 1001, -1, 1002, -1, 1003, -1]
Isendrecv_replace: [1000, -1, 1002, -1, 1004, -1, 1006, -1]
EXPECTED
