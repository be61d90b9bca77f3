#!/usr/bin/env bash
# MPICH 5.0.2: a receive from MPI.ANY_SOURCE into a buffer that is too short often raises no error while another thread
# polls a request of another communicator. The status then has more bytes than the buffer.
#
# Without the thread, with a named source, or after a matched probe each such receive raises ERR_TRUNCATE. The part of
# the message that fits is in the buffer, and the bytes after the buffer are untouched.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 mpich==5.0.2
cat >"$folder/program.py" <<'PROGRAM'
import threading
import time

import numpy as np
from mpi4py import MPI

CALLS = 1000
comm = MPI.COMM_WORLD
peer, other = 1 - comm.rank, comm.Dup()
message, memory = np.arange(1, 88, dtype=np.int32), np.zeros(100, np.int32)
buffer = memory[:86]


def lost(source, polls, probes=False):
    """Return how many truncated receives raise nothing, and how many bytes beyond the buffer are written."""
    pending, ends, count, overrun = other.Irecv(np.zeros(1), peer), threading.Event(), 0, 0

    def poll():
        while not ends.is_set():
            pending.Test()
            time.sleep(1e-5)

    thread = threading.Thread(target=poll)
    if polls:
        thread.start()
    for tag in range(CALLS):
        memory[:] = 0
        if tag % 3 == 0:
            time.sleep(0.001)
        send, status = comm.Isend(message, peer, tag), MPI.Status()
        try:
            if probes:
                comm.Mprobe(source, tag).Recv(buffer, status)
            else:
                comm.Recv(buffer, source, tag, status)
            count += 1
            assert status.Get_count(MPI.BYTE) == message.nbytes > buffer.nbytes
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_TRUNCATE
        overrun += int(memory[86:].any())
        send.Wait()
    ends.set()
    if polls:
        thread.join()
    comm.Barrier()
    other.Send(np.zeros(1), peer)
    pending.Wait()
    return comm.allreduce(count), comm.allreduce(overrun)


for name, arguments in (
    ("any source, a thread polls", (MPI.ANY_SOURCE, True)),
    ("any source, no thread", (MPI.ANY_SOURCE, False)),
    ("named source, a thread polls", (peer, True)),
    ("any source by a matched probe, a thread polls", (MPI.ANY_SOURCE, True, True)),
):
    count, overrun = lost(*arguments)
    if comm.rank == 0:
        print(f"{name}: {'some' if count else 'no'} errors lost, {overrun} overruns", flush=True)
        print(f"  {count} of {2 * CALLS}", flush=True)
PROGRAM
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" "$folder/program.py" </dev/null | tee "$folder/lines"
diff <(grep -v '^ ' "$folder/lines") - <<'EXPECTED' || { echo "the behaviour has changed"; exit 1; }
any source, a thread polls: some errors lost, 0 overruns
any source, no thread: no errors lost, 0 overruns
named source, a thread polls: no errors lost, 0 overruns
any source by a matched probe, a thread polls: no errors lost, 0 overruns
EXPECTED
