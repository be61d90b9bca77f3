"""Each rank writes its rank into the next rank's memory: `mpirun -np 4 python examples/peer_memory.py`.

The same program uses CuPy arrays on GPUs and NumPy arrays on a machine without GPUs.
"""

from mpi4py import MPI

import mpicomm

with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    a = comm.zeros(8, "float32")  # collective: the same shape on every rank
    a.peer(following)[...] = comm.rank  # a kernel (or NumPy) writes straight into the next rank's memory
    a.signal(following)  # publishes the earlier writes of this rank
    a.wait_signal(previous)

    assert (a.local == previous).all()
    comm.Barrier()
    if comm.rank == 0:
        print(f"rank 0 on {comm.device} found {a.local} in its memory, opened as {comm.handle}")
