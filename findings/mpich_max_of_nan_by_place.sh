#!/usr/bin/env bash
# MPICH 5.0.2 with mpi4py 4.1.2 and NumPy 2.4.6: Allreduce with MAX, two ranks; all of rank 0's elements are NaN.
#
# Of one element rank 0 gets 1.0 and rank 1 NaN. Of eight and of a thousand equal elements each rank gets both values
# in one array. So a program that stops when a residual is NaN stops on one rank, and the other waits for it. SUM is
# right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys

import numpy as np
from mpi4py import MPI

comm, found = MPI.COMM_WORLD, {}
for op in ("MAX", "SUM"):
    for dtype in ("float32", "float64"):
        for length in (1, 8, 1000):
            mine = np.full(length, np.nan if comm.rank == 0 else 1.0, dtype)
            result = np.empty_like(mine)
            comm.Allreduce(mine, result, op=getattr(MPI, op))
            found[op, dtype, length] = sorted({str(each) for each in result})
everyone = comm.gather(found)
if comm.rank == 0:
    for key in found:
        print(*key, *(f"rank {rank}: {' and '.join(each[key])}" for rank, each in enumerate(everyone)), sep="  ")
    for op, dtype, length in found:
        one, other = (each[op, dtype, length] for each in everyone)
        expected = [["nan"]] * 2 if op == "SUM" else [["1.0"], ["nan"]] if length == 1 else [["1.0", "nan"]] * 2
        if [one, other] != expected:
            sys.exit("the behaviour has changed")
PROGRAM
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" "$folder/program.py" </dev/null
