"""An all-reduce of CuPy arrays without a CUDA-aware MPI: `mpirun -np 4 python examples/gpu_allreduce.py`.

The ranks average their gradients, as data-parallel training does, and rank 0 prints how long that takes.
"""

import sys

from mpi4py import MPI

import mpicomm


def leave(reason: str) -> None:
    """Tell on one rank why this example does not run here, and end all ranks."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"this example needs CuPy and a GPU on every rank: {reason}; examples/stock_mpi4py.py runs without")
    sys.exit()


try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:  # no CuPy, no driver, no device: each raises another class
    leave(str(error).strip().split("\n")[0])

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.device == "cpu":
    leave("this rank has none")

count = 16 * 2**20
gradients = cupy.full(count, comm.rank, cupy.float32)  # on this rank's GPU, which Communicator made the current device
averaged = cupy.empty_like(gradients)

# The call is enqueued on CuPy's current stream: it returns at once, and later work on the stream finds the result.
comm.Allreduce(gradients, averaged, op=mpicomm.AVG)
assert (averaged == (comm.size - 1) / 2).all()

repeats = 20
start, end = cupy.cuda.Event(), cupy.cuda.Event()
start.record()
for _ in range(repeats):
    comm.Allreduce(gradients, averaged, op=mpicomm.AVG)
end.record()
end.synchronize()
comm.check()  # raises if a rank did not come

microseconds = 1000 * cupy.cuda.get_elapsed_time(start, end) / repeats
slowest = comm.allreduce(microseconds, op=MPI.MAX)
if comm.rank == 0:
    busbw = 2 * (comm.size - 1) / comm.size * gradients.nbytes / slowest / 1000
    print(f"{comm.size} ranks, {gradients.nbytes / 2**20:.0f} MiB: {slowest:.0f} us, bus bandwidth {busbw:.0f} GB/s")
comm.Free()
