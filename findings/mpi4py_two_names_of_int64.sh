#!/usr/bin/env bash
# mpi4py 4.1.2 with NumPy 2.4.6 and MPICH 5.0.2: two arrays of dtype int64 may have different MPI datatypes.
#
# On 64-bit Linux np.dtype("l") == np.dtype("q"), and NumPy makes either from the same sources (np.longlong, a C library, a
# file). mpi4py maps the characters: "l" to MPI.LONG, "q" to MPI.LONG_LONG. A reduction compares the handles of its two
# buffers and refuses the pair; messages and collectives that only move data take it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
from mpi4py import MPI

sent, received = np.ones(3, "l"), np.zeros(3, "q")
assert sent.dtype == received.dtype == np.int64
MPI.COMM_SELF.Sendrecv(sent, 0, 0, received, 0, 0)
MPI.COMM_SELF.Allgather(sent, received)
assert received.tolist() == [1, 1, 1]
print("Sendrecv, Allgather: taken")
try:
    MPI.COMM_SELF.Allreduce(sent, received)
except ValueError as error:
    print("Allreduce:", error)
    assert "mismatch in send and receive MPI datatypes" in str(error)
else:
    raise SystemExit("Allreduce was taken: the behaviour has changed")
PROGRAM
