"""A kernel that exchanges data with the kernels of peers while it runs: `mpirun -np 4 python examples/ring_sum.py`.

The kernel in ring_sum.cu stores into the next rank's memory, signals, and waits for the previous rank.
"""

import sys
from pathlib import Path

from mpi4py import MPI

import mpicomm


def leave(reason: str) -> None:
    """Tell on one rank why this example does not run here, and end all ranks."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"this example needs CuPy and a GPU on every rank: {reason}; examples/peer_memory.py runs without")
    sys.exit()


try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:  # no CuPy, no driver, no device: each raises another class
    leave(str(error).strip().split("\n")[0])

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.device == "cpu":
    leave("this rank has none")
if comm.num_nodes > 1:
    sys.exit("ranks reach each other's memory only on one node: start all ranks on one node")

count, calls, timeout_ns = 1000, 100, 10**10
inboxes = comm.zeros((2, comm.size, count), "float32")
flags = comm.zeros(1, "uint64")
values, sums = cupy.full(count, comm.rank, cupy.float32), cupy.empty(count, cupy.float32)
failed = cupy.zeros(1, cupy.uint32)

source = Path(__file__).with_name("ring_sum.cu").read_text()
options = ("-std=c++17", f"-I{mpicomm.include_dir()}")
kernel = cupy.RawModule(code=source, options=options).get_function("ring_sum")
# A kernel that waits may keep its GPU from loading another kernel, so all ranks load their kernels first. The read of
# an attribute loads this kernel.
assert kernel.num_regs > 0
comm.Barrier()

rank, size = cupy.uint32(comm.rank), cupy.uint32(comm.size)
for call in range(calls):
    data = (sums, values, cupy.uint32(count), inboxes.pointers, flags.pointers)
    kernel((1,), (256,), (*data, rank, size, cupy.uint64(call), cupy.uint64(timeout_ns), failed))

assert not failed.any(), "a rank did not come"
assert (sums == comm.size * (comm.size - 1) / 2).all()
comm.Barrier()
if comm.rank == 0:
    print(f"{comm.size} ranks added their numbers {calls} times, each time in one kernel")
comm.Free()
