#!/usr/bin/env bash
# mpi4py 4.1.2: the requests of some nonblocking collectives keep their buffers alive, and those of others do not.
#
# A request that keeps its buffers lets a program drop its arrays before the wait, as in `comm.Isend(x + 1, 0)`. Messages
# and most movements do so, Iallgather too, but not Iallgatherv, and no reduction: after `comm.Iallreduce(x + 1, y)`
# nothing holds the sum, so Python frees it while MPI may still read it. The request types are one and the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 mpich==5.0.2
cat >"$folder/program.py" <<'PROGRAM'
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_SELF
CALLS = {
    "Isend": lambda x, y: comm.Isend(x, 0),
    "Irecv": lambda x, y: comm.Irecv(y, 0),
    "Ibcast": lambda x, y: comm.Ibcast(y),
    "Igather": lambda x, y: comm.Igather(x, y),
    "Igatherv": lambda x, y: comm.Igatherv(x, y),
    "Iscatter": lambda x, y: comm.Iscatter(x, y),
    "Iscatterv": lambda x, y: comm.Iscatterv(x, y),
    "Iallgather": lambda x, y: comm.Iallgather(x, y),
    "Iallgatherv": lambda x, y: comm.Iallgatherv(x, y),
    "Ialltoall": lambda x, y: comm.Ialltoall(x, y),
    "Ialltoallv": lambda x, y: comm.Ialltoallv(x, y),
    "Ireduce": lambda x, y: comm.Ireduce(x, y),
    "Iallreduce": lambda x, y: comm.Iallreduce(x, y),
    "Ireduce_scatter": lambda x, y: comm.Ireduce_scatter(x, y),
    "Ireduce_scatter_block": lambda x, y: comm.Ireduce_scatter_block(x, y),
    "Iscan": lambda x, y: comm.Iscan(x, y),
    "Iexscan": lambda x, y: comm.Iexscan(x, y),
}
for name, call in CALLS.items():
    x, y = np.zeros(8), np.zeros(8)
    before = sys.getrefcount(x), sys.getrefcount(y)
    request = call(x, y)
    kept = sys.getrefcount(x) > before[0], sys.getrefcount(y) > before[1]
    if name == "Isend":
        comm.Recv(y)
    if name == "Irecv":
        comm.Send(x, 0)
    request.Wait()
    print(f"{name}: keeps {' and '.join(which for which, is_kept in zip(('send', 'receive'), kept) if is_kept) or 'nothing'}")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/lines"
diff "$folder/lines" - <<'EXPECTED' || { echo "the behaviour has changed"; exit 1; }
Isend: keeps send
Irecv: keeps receive
Ibcast: keeps receive
Igather: keeps send and receive
Igatherv: keeps send and receive
Iscatter: keeps send and receive
Iscatterv: keeps send and receive
Iallgather: keeps send and receive
Iallgatherv: keeps nothing
Ialltoall: keeps send and receive
Ialltoallv: keeps send and receive
Ireduce: keeps nothing
Iallreduce: keeps nothing
Ireduce_scatter: keeps nothing
Ireduce_scatter_block: keeps nothing
Iscan: keeps nothing
Iexscan: keeps nothing
EXPECTED
