"""A Numba kernel that reads the memory of all ranks: `mpirun -np 4 python examples/own_kernel_numba.py`.

`pointers` holds the address of each rank's part of a symmetric array, and the kernel loads numbers from these
addresses. So one kernel adds up the arrays of all ranks: an all-reduce to which any other arithmetic can be added.
"""

import sys
from typing import Any

from mpi4py import MPI

import mpicomm


def leave(reason: str) -> None:
    """Tell on one rank why this example does not run here, and end all ranks."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"this example needs Numba, CuPy and a GPU on every rank: {reason}")
    sys.exit()


try:
    import cupy
    from llvmlite import ir
    from numba import cuda, types
    from numba.extending import intrinsic

    cupy.cuda.runtime.getDeviceCount()
    cuda.jit("void()")(lambda: None)  # Numba raises at its first kernel if it does not work with this NumPy
except Exception as error:  # no package, no driver, no device: each raises another class
    leave(str(error).strip().split("\n")[0])

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.device == "cpu":
    leave("this rank has none")
if comm.num_nodes > 1:
    sys.exit("ranks reach each other's memory only on one node: start all ranks on one node")


@intrinsic
def load_float32(typing: Any, address: Any, index: Any) -> Any:
    """Return number ``index`` of the float32 array at an address, because Numba has arrays, but no pointers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        return builder.load(builder.gep(array, [arguments[1]]))

    return types.float32(types.uint64, types.int64), generate


@cuda.jit("void(float32[::1], uint64[::1])")
def add_up(sums: Any, pointers: Any) -> None:
    """Add the arrays of all ranks, in the order of the ranks."""
    index = cuda.grid(1)
    if index < sums.size:
        total = load_float32(pointers[0], index)
        for rank in range(1, pointers.size):
            total += load_float32(pointers[rank], index)
        sums[index] = total


count, threads = 2**20 + 5, 256
values, sums = comm.empty(count, "float32"), cupy.empty(count, cupy.float32)
blocks = -(-count // threads)
# A kernel that waits may keep its GPU from loading another kernel, and Barrier has such a kernel. So all ranks load
# this kernel first; its sums are not used.
add_up[blocks, threads](sums, values.pointers)
cuda.synchronize()
comm.Barrier()

stream = cupy.cuda.get_current_stream()  # CuPy's and Numba's default streams are the same
for call in range(10):
    values.local[...] = cupy.arange(count) % 1000 + call * comm.rank
    comm.Barrier(stream=stream)  # on the streams: all ranks have written their arrays
    add_up[blocks, threads](sums, values.pointers)
    comm.Barrier(stream=stream)  # all ranks have read the arrays
    expected = cupy.arange(count) % 1000 * comm.size + call * comm.size * (comm.size - 1) // 2
    assert (sums == expected).all(), f"call {call}: another sum"
comm.check()
if comm.rank == 0:
    print(f"a Numba kernel added the arrays of {comm.size} ranks where they lie")
comm.Free()
