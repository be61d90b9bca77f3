"""A Triton kernel that reads the memory of all ranks: `mpirun -np 4 python examples/own_kernel_triton.py`.

`pointers` holds the address of each rank's part of a symmetric array, and the kernel makes pointers of them. So one
kernel adds up the arrays of all ranks: an all-reduce to which any other arithmetic can be added.
"""

import sys

from mpi4py import MPI

import mpicomm


def leave(reason: str) -> None:
    """Tell on one rank why this example does not run here, and end all ranks."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"this example needs Triton, PyTorch, CuPy and a GPU on every rank: {reason}")
    sys.exit()


try:
    import cupy
    import torch
    import triton
    import triton.language as tl

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:  # no package, no driver, no device: each raises another class
    leave(str(error).strip().split("\n")[0])

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.device == "cpu":
    leave("this rank has none")
if comm.num_nodes > 1:
    sys.exit("ranks reach each other's memory only on one node: start all ranks on one node")


@triton.jit
def add_up(sums, pointers, count, size, at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the arrays of all ranks, in the order of the ranks."""
    place = tl.program_id(0) * at_once + tl.arange(0, at_once)
    total = tl.zeros([at_once], tl.float32)
    for rank in range(size):
        part = tl.load(pointers + rank).to(tl.pointer_type(tl.float32))
        total += tl.load(part + place, mask=place < count)
    tl.store(sums + place, total, mask=place < count)


count, at_once = 2**20 + 5, 1024
values = comm.empty(count, "float32")
mine, pointers = torch.from_dlpack(values), torch.from_dlpack(values.pointers)  # zero copy
sums = torch.empty_like(mine)
grid = (triton.cdiv(count, at_once),)
# A kernel that waits may keep its GPU from loading another kernel, and Barrier has such a kernel. So all ranks load
# this kernel first; its sums are not used.
add_up[grid](sums, pointers, count, comm.size, at_once=at_once)
torch.cuda.synchronize()
comm.Barrier()

stream = torch.cuda.current_stream()
for call in range(10):
    mine.copy_(torch.arange(count, device=mine.device) % 1000 + call * comm.rank)
    comm.Barrier(stream=stream)  # on the streams: all ranks have written their arrays
    add_up[grid](sums, pointers, count, comm.size, at_once=at_once)
    comm.Barrier(stream=stream)  # all ranks have read the arrays
    expected = torch.arange(count, device=mine.device) % 1000 * comm.size + call * comm.size * (comm.size - 1) // 2
    assert (sums == expected).all(), f"call {call}: another sum"
comm.check()
if comm.rank == 0:
    print(f"a Triton kernel added the arrays of {comm.size} ranks where they lie")
comm.Free()
