"""A short run of every kernel, for tools that look at each access of it.

`mpiexec -n 2 python -m mpi4py -m tests.helpers.programs.every_kernel`. With ``--late`` ranks come late at random, and
the run is long: thousands of calls and replays. With ``--own-memory`` the run leaves out messages that MPI matches,
and experts, because their kernels read memory that a peer has written. With ``--whole-warps`` it leaves out kernels in
which the lanes of a warp come to a barrier one by one.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.gpu.algorithms.direct import plan as direct_plan
from tests.helpers.inputs.checked_on_device import idle_kernel
from tests.helpers.inputs.communicator_calls import Case, Prepared
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples

COUNTS = (1, 5, 1003, 20011)
TYPES = ("float32", "bfloat16", "int32", "complex128")
CALLS = 4000
REPLAYS = 200
INT32 = np.dtype(np.int32)
OWN_MEMORY = "--own-memory"
WHOLE_WARPS = "--whole-warps"


def run(comm: mpicomm.Communicator, cases: Iterable[Case]) -> None:
    """Enqueue all calls, then wait for the device and compare."""
    calls = [Prepared(case, comm.rank, comm.size, cupy) for case in cases]
    for call in calls:
        call.run(comm)
    comm.check()
    for call in calls:
        call.check()


def reductions(comm: mpicomm.Communicator) -> None:
    """Reduce in each way to share out the result."""
    for name, count in itertools.product(TYPES, COUNTS):
        names = ("Allreduce", "Reduce_scatter_block", "Reduce")
        run(comm, [Case(operation, dtype_named(name), count, wild=True) for operation in names])


def movements(comm: mpicomm.Communicator, *counts: int) -> None:
    """Broadcast from the last rank, gather and exchange."""
    for count in counts:
        calls = (("Bcast", comm.size - 1), ("Allgather", 0), ("Alltoall", 0))
        run(comm, [Case(operation, INT32, count, root=root) for operation, root in calls])


def each_way(comm: mpicomm.Communicator) -> None:
    """Take the ways of larger messages: two hops, relays, chunks that are reduced, inboxes used again."""
    for name, count, algorithm in (
        ("float32", 5003, "two_shot"),
        ("int32", 5003, "two_shot"),
        ("int32", 200003, "one_shot"),
        ("float32", 5000011, "one_shot"),  # more than large inboxes hold
        ("int32", 5000011, "one_shot"),
        ("int32", 200003, "ring"),  # exchange.cu
    ):
        run(comm, [Case("Allreduce", np.dtype(name), count, algorithm=algorithm, wild=True)])
    for count in (5003, 700001):
        for algorithm in ("two_shot", "chain"):
            run(comm, [Case("Bcast", INT32, count, root=comm.size - 1, algorithm=algorithm)])
        for name in ("float32", "int32"):  # without escapes, with them
            run(comm, [Case("Reduce", np.dtype(name), count, algorithm="chain", wild=True)])


def finished(comm: mpicomm.Communicator) -> None:
    """Apply epilogues in the kernels that reduce: in one hop and in two, in few steps and in inboxes used again."""
    hidden, total = 1028, comm.size * (comm.size + 1) // 2
    for rows, algorithm in ((5, "one_shot"), (64, "two_shot"), (5000, "one_shot"), (5000, "two_shot")):
        count = rows * hidden
        mine, wide = cupy.full(count, comm.rank + 1, np.float32), cupy.zeros(count, np.float64)
        comm.Allreduce(mine, wide, algorithm=algorithm, epilogue="v * 2 + i")
        check([(wide, 2.0 * total + np.arange(count))])
        if WHOLE_WARPS in sys.argv:
            continue
        normal, residual = cupy.zeros(count, np.float32), cupy.ones(count, np.float32)
        norm = mpicomm.epilogues.rms_norm(residual, cupy.ones(hidden, np.float32), 0.0)
        comm.Allreduce(mine, normal, algorithm=algorithm, epilogue=norm)
        check([(residual, np.full(count, total + 1, np.float32)), (normal, np.ones(count, np.float32))])
        quantized, scales = (
            cupy.zeros(count // 2, np.uint8),
            cupy.zeros(rows, np.float32),
        )  # of 4 bits, a scale for each row
        ones, zeros = (make(hidden, np.float32) for make in (cupy.ones, cupy.zeros))
        norm = mpicomm.epilogues.layer_norm(residual, zeros, ones, linear_bias=ones, scales=scales)
        comm.Allreduce(mine, quantized, algorithm=algorithm, epilogue=norm)
        check(
            [(quantized, np.full(count // 2, 0x77, np.uint8)), (scales, np.full(rows, np.float32(1) / 6, np.float32))]
        )


def quantized(comm: mpicomm.Communicator) -> None:
    """Send quantized elements: in one hop and in two, in few steps and in inboxes used again."""
    for count, wire in ((5003, "int8"), (700_001, "float8_e4m3fn"), (17_000_011, "int8")):
        sums = Case("Allreduce", np.dtype(np.float32), count, wire=wire)
        for algorithm in ("one_shot", "two_shot"):
            run(comm, [replace(sums, algorithm=algorithm)])
        if count < 1 << 20:  # NumPy takes long for more
            run(comm, [replace(sums, operation=operation) for operation in ("Allgather", "Reduce_scatter_block")])


def uneven(comm: mpicomm.Communicator) -> None:
    """Exchange messages whose lengths only two ranks know; far more messages go one way than the other."""
    counts = [[5_000_003 if source < target else 5 for target in range(comm.size)] for source in range(comm.size)]
    sent, received = counts[comm.rank], [row[comm.rank] for row in counts]
    parts = [cupy.full(count, 10 * comm.rank + target, np.int32) for target, count in enumerate(sent)]
    got = cupy.zeros(sum(received), np.int32)
    comm.Alltoallv([cupy.concatenate(parts), sent], [got, received])
    come = [np.full(count, 10 * source + comm.rank, np.int32) for source, count in enumerate(received)]
    check([(got, np.concatenate(come))])


def symmetric(comm: mpicomm.Communicator) -> None:
    """Write straight into the memory of the others: kernels, copy engines with a local reduction."""
    size, rank = comm.size, comm.rank
    with comm.zeros(300_007 * size, np.float32) as array:
        for count in (1003, 300_007):
            parts = [samples(array.dtype, count, np.random.default_rng([count, peer])) for peer in range(size)]
            mine, output = cupy.asarray(parts[rank]), array.local[:count]
            for algorithm in ("one_shot", "copy_engine"):
                gathered = array.local[: count * size]
                comm.Allgather(mine, gathered, algorithm=algorithm)
                check([(gathered, np.concatenate(parts))])
                comm.Barrier(stream=cupy.cuda.get_current_stream())
            comm.Allreduce(mine, output, algorithm="copy_engine")
            check([(output, reduced("sum", parts))])
            comm.Barrier(stream=cupy.cuda.get_current_stream())
            for algorithm in ("one_shot", "two_shot", "copy_engine"):
                output[:] = mine
                comm.Barrier(stream=cupy.cuda.get_current_stream())
                comm.Bcast(output, root=0, algorithm=algorithm)
                check([(output, parts[0])])
                comm.Barrier(stream=cupy.cuda.get_current_stream())


def check(results: list[tuple[Any, Any]]) -> None:
    """Wait for the device and compare."""
    cupy.cuda.Device().synchronize()
    for got, expected in results:
        require_same(got.get().view(expected.dtype).reshape(expected.shape), expected)


def signals(comm: mpicomm.Communicator) -> None:
    """Put around the ring, with signals."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.zeros(1000, np.int32) as array:
        array.put(cupy.full(1000, comm.rank, np.int32), following)
        array.signal(following)
        array.wait_signal(previous)
        assert int(array.local.min()) == int(array.local.max()) == previous
        comm.Barrier()


def messages(comm: mpicomm.Communicator) -> None:
    """Send around the ring: by one block, by several, and by copy engines."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (2, 9001, 300_001, 5_000_001):
        sent, received = cupy.full(count, comm.rank, np.int32), cupy.zeros(count, np.int32)
        comm.Sendrecv(sent, following, 0, received, previous, 0)
        assert (received.get() == previous).all()
        request = comm.Irecv(received, previous, 1)
        sent[...] = 10 + comm.rank
        comm.Send(sent, following, 1)
        time.sleep(0.001)  # the thread that completes requests looks too
        request.Wait()
        assert (received.get() == 10 + previous).all()


def datatypes(comm: mpicomm.Communicator) -> None:
    """Send columns around the ring, and exchange them with both neighbours in a grid that is a ring."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for rows in (3, 5000):
        columns = MPI.INT32_T.Create_vector(rows, 3, 8).Commit()
        sent, received = cupy.full((rows, 8), comm.rank, np.int32), cupy.full((rows, 8), -1, np.int32)
        expected = np.full((rows, 8), -1, np.int32)
        if OWN_MEMORY not in sys.argv:
            comm.Sendrecv([sent, 1, columns], following, 0, [received, 1, columns], previous)
            expected[:, :3] = previous
            check([(received, expected)])
        ring = comm.Create_cart([comm.size], [True])
        places, types = ([1, 1], [0, 16]), [columns, columns]
        ring.Neighbor_alltoallw([sent, places, types], [received, places, types])
        expected[:, :3], expected[:, 4:7] = previous, following
        check([(received, expected)])
        ring.Free()
        columns.Free()


def windows(comm: mpicomm.Communicator) -> None:
    """Access the next rank's part of a window under a lock, or this rank's; then this rank's part between fences."""
    target = comm.rank if OWN_MEMORY in sys.argv else (comm.rank + 1) % comm.size
    win = mpicomm.Win.Allocate(8000, 4, MPI.INFO_NULL, comm, place="device")
    part = win.tomemory().view(np.int32)
    part[...] = 1
    group = win.Get_group()
    win.Fence()
    spread = MPI.INT32_T.Create_vector(100, 1, 3).Commit()
    ones, before = cupy.ones(1000, np.int32), cupy.zeros(1000, np.int32)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Lock(target)
    win.Put(ones, target, 1000)
    win.Accumulate(ones, target)
    win.Get_accumulate([ones, 100, MPI.INT32_T], [before, 100, MPI.INT32_T], target, (0, 1, spread))
    win.Accumulate(ones[:10], target, 500, MPI.PROD)
    win.Compare_and_swap(ones[:1], ones[:1], before[-1:], target, 1999)
    win.Unlock(target)
    win.Lock_all()
    win.Fetch_and_op(ones[:1], before[-2:-1], target, 1998)
    win.Unlock_all()
    win.Post(group)
    win.Start(group)
    win.Complete()
    win.Wait()
    expected = np.full(2000, 2, np.int32)
    expected[:300:3] += 1
    expected[1000:] = 1
    expected[1998] += 1
    check([(part, expected), (before[:100], np.full(100, 2, np.int32)), (before[-2:], np.ones(2, np.int32))])
    spread.Free()
    group.Free()
    win.Free()


def large_messages() -> None:
    """Let direct.cu take these messages for messages larger than any here."""
    direct_plan.most_copied_nbytes = lambda operation, domain: 1 << 10
    with mpicomm.Communicator(MPI.COMM_WORLD, timeout_s=120) as comm:  # another communicator, which knows no calls
        movements(comm, 300007)
        each_way(comm)
        symmetric(comm)
        comm.check()


def in_stream_order(comm: mpicomm.Communicator) -> None:
    """Send around the ring, both ways at once and one after the other; the last is more than the slots hold."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (5, 9001, 700_001, 5_000_001):
        sent, received = cupy.full(count, comm.rank, np.int32), cupy.zeros(count, np.int32)
        comm.Sendrecv(sent, following, 0, received, previous, algorithm="stream")
        check([(received, np.full(count, previous, np.int32))])
        if comm.rank == 0:
            comm.Send(sent, 1, 1, algorithm="stream")
        if comm.rank == 1:
            comm.Recv(received, 0, 1, algorithm="stream")
            check([(received, np.zeros(count, np.int32))])


def mixture(comm: mpicomm.Communicator) -> None:
    """Send few tokens to experts and back, and more tokens, which take other receive slots; counts come in two ways."""
    hidden, top_k, most, rng = 64, 4, 1500, np.random.default_rng(3)
    experts = [3] * comm.size
    for layout in ("experts", "tokens"):
        with mpicomm.Experts(comm, experts, hidden, most, top_k, "float32", alignment=4, layout=layout) as made:
            for count in (5, 200, most, 5):
                ids = rng.integers(-1, sum(experts), (comm.size, count, top_k))
                x, mine = cupy.arange(count * hidden, dtype=np.float32).reshape(count, hidden), ids[comm.rank]
                received = made.dispatch(x, cupy.asarray(mine))
                z = cupy.where(cupy.arange(made.capacity)[:, None] < _rows(received), received.x, 0)
                y = made.combine(z, received)
                owners = np.where(mine < 0, -1, mine // 3)
                places = sum((owners == rank).any(axis=1) for rank in range(comm.size))
                weights = places if layout == "tokens" else (mine >= 0).sum(axis=1)
                own = np.bincount(ids[(ids >= 0) & (ids // 3 == comm.rank)] % 3, minlength=3)
                check([(received.counts, own.astype(np.int32)), (y, x.get() * weights[:, None].astype(np.float32))])


def _rows(received: mpicomm.Received) -> Any:
    return received.offsets[-1] if received.row_count is None else received.row_count[0]


def require_one_context(device: int) -> None:
    """Raise if this process has a context, of half a GiB, on a GPU that is not its own."""
    for other in range(cupy.cuda.runtime.getDeviceCount()):
        error, _, active = driver.cuDevicePrimaryCtxGetState(other)
        assert error == driver.CUresult.CUDA_SUCCESS, error
        assert bool(active) == (other == device), f"GPU {other} is {'' if active else 'not '}in use, {device} is mine"


def collect_on_a_bare_thread(comm: mpicomm.Communicator) -> None:
    """Leave events of mpicomm to the garbage collector, on a thread that has never touched CUDA."""
    gpu = comm._session.gpu("collect")
    garbage: list[Any] = [gpu.side_streams.mark(0), gpu.completion(0)]
    garbage.append(garbage)
    del garbage
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()


def stress(comm: mpicomm.Communicator) -> None:
    """Run thousands of calls in which ranks come late, on the host and on the device, and replays of graphs."""
    rng = np.random.default_rng(7)  # the same on all ranks
    own = np.random.default_rng([8, comm.rank])
    stream = cupy.cuda.Stream(non_blocking=True)
    idle = idle_kernel(cupy)
    with stream:
        for call in range(CALLS):
            count = int(rng.choice((1, 3, 700, 5000, 70001, 600011)))
            x, y = cupy.full(count, comm.rank + call % 50, np.float32), cupy.empty(count, np.float32)
            if own.random() < 0.1:
                idle((1,), (1,), (int(own.integers(1000, 400000)),))
            if own.random() < 0.02:
                time.sleep(float(own.random()) * 0.01)
            comm.Allreduce(x, y)
            if call % 20 == 0:
                expected = comm.size * (call % 50) + comm.size * (comm.size - 1) // 2
                assert bool((y == expected).all()), (call, count)
        for count in (1, 2000, 100003, 3000017):
            x, y, z = (cupy.full(count, comm.rank + 1, np.float32) for _ in range(3))
            comm.Allreduce(x, y)
            stream.begin_capture()
            for _ in range(5):
                idle((1,), (1,), (int(own.integers(100, 20000)),))
                comm.Allreduce(x, y)
                comm.Bcast(z, root=comm.size - 1)
            graph = stream.end_capture()
            for _ in range(REPLAYS):
                graph.launch()
            stream.synchronize()
            assert bool((y == comm.size * (comm.size + 1) // 2).all())
            assert bool((z == comm.size).all())
    comm.check()


def main() -> None:
    """Run; an exception on any rank ends all ranks and prints the stacks of the others."""
    faulthandler.dump_traceback_later(HANG_S)
    with mpicomm.Communicator(MPI.COMM_WORLD, timeout_s=120) as comm:
        if "--late" in sys.argv:
            start = time.perf_counter()
            stress(comm)
            if comm.rank == 0:
                sys.stdout.write(
                    f"{CALLS} calls and {4 * 5 * 2 * REPLAYS} replayed ones in {time.perf_counter() - start:.1f} s\n"
                )
            return
        reductions(comm)
        movements(comm, *COUNTS, 300007)
        each_way(comm)
        finished(comm)
        quantized(comm)
        uneven(comm)
        symmetric(comm)
        signals(comm)
        if OWN_MEMORY not in sys.argv:
            messages(comm)
            mixture(comm)
        datatypes(comm)
        in_stream_order(comm)
        windows(comm)
        collect_on_a_bare_thread(comm)
        comm.check()
        large_messages()
        if isinstance(comm.device, int):
            require_one_context(comm.device)


if __name__ == "__main__":
    main()
