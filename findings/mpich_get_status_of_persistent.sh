#!/usr/bin/env bash
# MPICH 5.0.2: Get_status of a persistent receive that is complete makes it inactive; one of Irecv stays as it is.
#
# MPI's Request_get_status only looks: the wait after it still returns the status. After it has found a persistent
# receive complete, MPICH's Wait and Waitall return an empty status (ANY_SOURCE, no elements), and Waitany returns
# UNDEFINED in place of the index, as for requests that were never started. The data is there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 mpich==5.0.2
cat >"$folder/program.py" <<'PROGRAM'
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
for kind in ("Irecv", "Recv_init"):
    for end in ("Wait", "Waitall", "Waitany"):
        if comm.rank == 0:
            comm.Send(np.arange(4, dtype=np.int32), 1, 7)
            continue
        data, status = np.zeros(10, np.int32), MPI.Status()
        request = getattr(comm, kind)(data, 0, 7)
        if kind == "Recv_init":
            request.Start()
        while not request.Get_status():
            pass
        if end == "Wait":
            request.Wait(status)
        elif end == "Waitall":
            MPI.Request.Waitall([request], [status])
        else:
            index = MPI.Request.Waitany([request], status)
            end = f"Waitany {'UNDEFINED' if index == MPI.UNDEFINED else index}"
        if request:
            request.Free()
        count = status.Get_count(MPI.INT32_T)
        print(f"{kind}, {end}: source {status.source}, {count} elements, data {data[:4].tolist()}", flush=True)
PROGRAM
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" "$folder/program.py" </dev/null | tee "$folder/lines"
diff "$folder/lines" - <<'EXPECTED' || { echo "the behaviour has changed"; exit 1; }
Irecv, Wait: source 0, 4 elements, data [0, 1, 2, 3]
Irecv, Waitall: source 0, 4 elements, data [0, 1, 2, 3]
Irecv, Waitany 0: source 0, 4 elements, data [0, 1, 2, 3]
Recv_init, Wait: source -2, 0 elements, data [0, 1, 2, 3]
Recv_init, Waitall: source -2, 0 elements, data [0, 1, 2, 3]
Recv_init, Waitany UNDEFINED: source -2, 0 elements, data [0, 1, 2, 3]
EXPECTED
