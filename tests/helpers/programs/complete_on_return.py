"""A program for a CUDA-aware MPI, on 2 ranks: after each blocking call another stream uses the buffers at once.

It runs as ``python -m mpicomm complete_on_return.py cupy|torch``. Each rank prints the names of the calls after which
it saw old data, and "done". A kernel delays the current stream, so a call that is only enqueued is not over on return.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
from cupy.cuda import runtime
from mpi4py import MPI

COUNT = 1 << 14
DELAY_NS = 30_000_000
world = MPI.COMM_WORLD
rank, size = world.rank, world.size
peer = 1 - rank
grid = world.Create_cart([size], [True])
_DELAY = cp.RawKernel(
    """extern "C" __global__ void delay(long long nanoseconds) {
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
    }""",
    "delay",
)
Call = Callable[[Any, Any], object]


def alltoallw(x: Any, y: Any) -> None:
    part = MPI.FLOAT.Create_vector(COUNT // 4, 1, 2).Commit()
    half = 2 * COUNT
    counts, starts = [1, 1], [0, half]
    world.Alltoallw([x, (counts, starts), [part, part]], [y, (counts, starts), [part, part]])
    part.Free()


def test_until_true(request: MPI.Request) -> None:
    while not request.Test():
        pass


def send_and_receive(x: Any, y: Any) -> None:
    if rank == 0:
        world.Send(x, peer)
        world.Recv(y, peer)
    else:
        world.Recv(y, peer)
        world.Send(x, peer)


def exchange_in_place(x: Any, y: Any) -> None:
    y[:] = x
    world.Sendrecv_replace(y, peer, 0, peer, 0)


def persistent(x: Any, y: Any) -> None:
    request = world.Allreduce_init(x, y)
    request.Start()
    request.Wait()
    request.Free()


HALF = COUNT // 2
CALLS: dict[str, Call] = {
    "Allreduce": lambda x, y: world.Allreduce(x, y),
    "Reduce": lambda x, y: world.Reduce(x, y, root=0),
    "Scan": lambda x, y: world.Scan(x, y),
    "Reduce_scatter_block": lambda x, y: world.Reduce_scatter_block(x, y[:HALF]),
    "Reduce_scatter": lambda x, y: world.Reduce_scatter(x, y[:HALF], [HALF, HALF]),
    "Bcast": lambda x, y: world.Bcast(x if rank == 0 else y, 0),
    "Allgather": lambda x, y: world.Allgather(x[:HALF], y),
    "Allgatherv": lambda x, y: world.Allgatherv(x[:HALF], [y, [HALF, HALF]]),
    "Gather": lambda x, y: world.Gather(x[:HALF], y if rank == 0 else None, 0),
    "Scatter": lambda x, y: world.Scatter(x if rank == 0 else None, y[:HALF], 0),
    "Alltoall": lambda x, y: world.Alltoall(x, y),
    "Alltoallv": lambda x, y: world.Alltoallv([x, [HALF, HALF]], [y, [HALF, HALF]]),
    "Alltoallw": alltoallw,
    "Neighbor_allgather": lambda x, y: grid.Neighbor_allgather(x[:HALF], y),
    "Sendrecv": lambda x, y: world.Sendrecv(x, peer, 0, y, peer, 0),
    "Sendrecv_replace": exchange_in_place,
    "Send and Recv": send_and_receive,
    "Iallreduce and Wait": lambda x, y: world.Iallreduce(x, y).Wait(),
    "Iallreduce and Test": lambda x, y: test_until_true(world.Iallreduce(x, y)),
    "Allreduce_init": persistent,
    "Irecv and Isend": lambda x, y: MPI.Request.Waitall([world.Irecv(y, peer), world.Isend(x, peer)]),
}
OUTPUT_AT = {"Reduce": 0, "Gather": 0, "Bcast": 1}


def put(x: Any, window: MPI.Win) -> None:
    window.Fence()
    window.Put(x, peer)
    window.Fence()


def put_under_a_lock(x: Any, window: MPI.Win) -> None:
    window.Lock(peer)
    window.Put(x, peer)
    window.Unlock(peer)


def arrays_of(library: str) -> tuple[Callable[[Any], Any], Callable[[Any], int], Callable[[], object]]:
    """Return a function that makes a device array, one that returns its address, and one that delays the stream."""
    if library == "torch":
        import torch

        torch.cuda.set_device(runtime.getDevice())
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        outside = cp.cuda.ExternalStream(stream.cuda_stream)
        return (
            lambda content: torch.from_numpy(content).cuda(),
            lambda tensor: tensor.data_ptr(),
            lambda: _DELAY((1,), (1,), (DELAY_NS,), stream=outside),
        )
    return cp.asarray, lambda array: int(array.data.ptr), lambda: _DELAY((1,), (1,), (DELAY_NS,))


def main(library: str) -> None:
    make, address, delay = arrays_of(library)
    other = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    rng = np.random.default_rng(rank)
    old: set[str] = set()

    def use_beside(x: Any, y: Any) -> Any:
        """Overwrite the input and read the output on a stream that no library knows."""
        seen = np.empty(COUNT, np.float32)
        runtime.memsetAsync(address(x), 0xFF, 4 * COUNT, other)
        runtime.memcpyAsync(seen.ctypes.data, address(y), seen.nbytes, runtime.memcpyDeviceToHost, other)
        runtime.streamSynchronize(other)
        return seen

    for turn in range(3):  # a new call, a known call, and one that is a graph
        for name, call in CALLS.items():
            given, expected = rng.integers(0, 100, COUNT).astype(np.float32), np.zeros(COUNT, np.float32)
            x, y = make(given), make(expected)
            call(given, expected)
            if turn and name not in ("Alltoallw", "Sendrecv_replace"):  # the same arrays again
                cp.cuda.Device().synchronize()
                call(x, y)
            cp.cuda.Device().synchronize()
            world.Barrier()
            delay()
            call(x, y)
            seen = use_beside(x, y)
            if rank == OUTPUT_AT.get(name, rank) and not np.array_equal(seen, expected):
                old.add(name)
            cp.cuda.Device().synchronize()
            world.Barrier()

    part = make(np.zeros(COUNT, np.float32))
    window = MPI.Win.Create(part, 4, comm=world)
    for access in (put, put_under_a_lock):
        for _ in range(2):
            x, given = make(np.full(COUNT, rank + 1, np.float32)), np.full(COUNT, peer + 1, np.float32)
            cp.cuda.Device().synchronize()
            world.Barrier()
            delay()
            access(x, window)
            if access is put and not np.array_equal(use_beside(x, part), given):
                old.add(access.__name__)
            elif access is put_under_a_lock:
                world.Barrier()  # the origin's Unlock has returned, so the data is there
                if not np.array_equal(use_beside(x, part), given):
                    old.add(access.__name__)
            cp.cuda.Device().synchronize()
            world.Barrier()
            part[:] = 0
            cp.cuda.Device().synchronize()
            world.Barrier()
    window.Free()
    grid.Free()
    runtime.streamDestroy(other)
    sys.stdout.write(f"rank {rank} saw old data after {sorted(old)}\nrank {rank} done\n")


if __name__ == "__main__":
    main(sys.argv[1])
