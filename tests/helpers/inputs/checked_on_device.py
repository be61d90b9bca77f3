"""Collectives whose input kernels make and whose result kernels check, so that graphs can replay them.

`idle_kernel` makes a rank late for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.gpu.tuning import algorithms_of
from mpicomm.collectives.operations import OPERATIONS as TABLE
from mpicomm.collectives.operations import Operation
from tests.helpers.references.reductions import SENTINELS
from tests.helpers.rigs.communicators import ring_in_host

COLLECTIVES = (
    *("Allreduce", "Reduce", "Reduce_scatter_block", "Allgather", "Alltoall"),
    *("Bcast", "Gather", "Scatter"),
)
OPERATIONS = (*COLLECTIVES, "Sendrecv")
DTYPES = ("float16", "float32", "float64", "int32", "uint32", "int64", "uint8")
IN_PLACE = tuple(name for name in COLLECTIVES if not TABLE[name].rooted)
"""The operations that are also called in place; Bcast is always in place."""

# The value that a rank has at a place in a step. Values are small, so that sums over ranks are exact in every type.
# Sums of unsigned words wrap, so an eighth of those words are SENTINELS.
_SENTINELS = f"""
#define ABSENT {SENTINELS[0]}u
#define ESCAPED {SENTINELS[1]}u
"""
_VALUE = """
template <class T> struct Words { enum { are = 0 }; };
template <> struct Words<unsigned> { enum { are = 1 }; };
template <class T>
__device__ unsigned value(unsigned long long step, unsigned rank, unsigned long long place) {
    unsigned long long x = (step * 64 + rank) * 0x9e3779b97f4a7c15ull + place * 0xd1342543de82ef95ull;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
    const unsigned small = (unsigned)(x >> 40) & 15;
    if (!Words<T>::are || small > 1) return small;
    return small ? ABSENT : ESCAPED;
}
"""
# An element is the sum over ``sources`` ranks. The first of these ranks is ``first`` plus the number of the element's
# block.
_CHECK = """
    unsigned long long place = offset + i % block;
    unsigned sum = 0;
    for (unsigned source = 0; source < sources; ++source)
        sum += value<T>(step[0], first + source + (unsigned)(i / block), place);
    if (found != (T)sum) atomicAdd(&wrong[number], 1ull);
"""
_IDLE = 'extern "C" __global__ void idle(long long cycles) { for (auto t = clock64(); clock64() - t < cycles;) {} }'


@dataclass(frozen=True)
class Call:
    """A collective, or a Sendrecv along the ranks of a host, as all ranks know it; a block has ``count`` elements."""

    operation: str
    dtype: str
    count: int
    root: int = 0
    algorithm: str = "auto"
    in_place: bool = False
    symmetric: bool = False
    """Whether the output is symmetric memory."""

    @property
    def row(self) -> Operation | None:
        """The collective's row in the table; None for Sendrecv."""
        return TABLE.get(self.operation)

    @property
    def sends_blocks(self) -> bool:
        """Whether the input has a block for each rank."""
        return self.row is not None and self.row.send == "blocks"

    @property
    def receives_blocks(self) -> bool:
        """Whether the output has a block for each rank."""
        return self.row is not None and self.row.receive == "blocks"


def draw(rng: np.random.Generator, size: int, nbytes: tuple[int, int], algorithms: Sequence[str]) -> Call:
    """Draw a call between ``size`` ranks; its size in bytes lies between the limits."""

    def choose(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    operation, dtype, algorithm = choose(OPERATIONS), choose(DTYPES), choose(algorithms)
    whole = int(2 ** rng.uniform(*np.log2(nbytes))) // np.dtype(dtype).itemsize
    root, in_place, symmetric = int(rng.integers(size)), rng.random() < 0.3, rng.random() < 0.3
    chained = operation == "Bcast" or (root in (0, size - 1) and dtype != "float16")
    if operation == "Sendrecv":
        algorithm = "one_shot"
    elif algorithm not in algorithms_of(operation) or (algorithm == "chain" and not chained):
        algorithm = "auto"
    call = Call(operation, dtype, whole, root, algorithm, bool(in_place and operation in IN_PLACE), bool(symmetric))
    return replace(call, count=whole // size) if call.sends_blocks or call.receives_blocks else call


class CheckedSequence:
    """Collectives on the current stream, one after the other, with new values in each run. Making one is collective."""

    def __init__(self, comm: mpicomm.Communicator, calls: Sequence[Call], xp: Any) -> None:
        self._comm = comm
        self._following, self._previous = ring_in_host(comm)
        self._step = xp.zeros(1, np.uint64)
        self._wrong = xp.zeros(len(calls), np.uint64)
        self._fill = xp.ElementwiseKernel(
            "raw uint64 step, uint32 rank",
            "T out",
            "out = (T)value<T>(step[0], rank, i)",
            "fill",
            preamble=_SENTINELS + _VALUE,
        )
        self._compare = xp.ElementwiseKernel(
            "T found, raw uint64 step, uint32 first, uint32 sources, uint64 block, uint64 offset, uint64 number",
            "raw uint64 wrong",
            _CHECK,
            "compare",
            preamble=_SENTINELS + _VALUE,
        )
        self._arrays = contextlib.ExitStack()
        self._calls = [(call, *self._buffers(call, xp)) for call in calls]

    def run(self) -> None:
        """Make input, call and check, on the current stream. Collective; can be captured after a first run."""
        self._step += 1
        for number, (call, sent, received) in enumerate(self._calls):
            self._fill(self._step, self._comm.rank, sent)
            self._run(call, sent, received)
            if received is not None:
                self._compare(received, self._step, *self._sources(call), np.uint64(number), self._wrong)

    def check(self) -> None:
        """Raise if any run so far had a wrong element; waits for the GPU. Local."""
        self._comm.check()
        wrong = self._wrong.get().tolist()
        said = [f"{count} elements of {self._calls[number][0]}" for number, count in enumerate(wrong) if count]
        assert not said, f"rank {self._comm.rank} of {self._comm.size}: wrong were {', '.join(said)}"

    def close(self) -> None:
        """Close the symmetric arrays. Collective."""
        self._arrays.close()

    def _buffers(self, call: Call, xp: Any) -> tuple[Any, Any]:
        """Return the input and the output of this rank; the output is None if the rank receives nothing."""
        size, rank, count = self._comm.size, self._comm.rank, call.count
        sends = count * size if call.sends_blocks else count
        receives = count * size if call.receives_blocks else count
        room = max(sends, receives) if call.in_place else receives
        dtype = np.dtype(call.dtype)
        if call.symmetric:
            whole = self._arrays.enter_context(self._comm.empty(room, dtype)).local
        else:
            whole = xp.empty(room, dtype)
        received = whole[:receives]
        rooted = call.row.rooted if call.row else ""
        if rooted == "bcast":
            return received, received
        if call.in_place:
            start = rank * count if receives > sends else 0
            return whole[start : start + sends], received
        if rooted == "receive" and rank != call.root:
            received = None
        return xp.empty(sends, dtype), received

    def _run(self, call: Call, sent: Any, received: Any) -> None:
        comm, row = self._comm, call.row
        if row is None:
            comm.Sendrecv(sent, self._following, 0, received, self._previous, 0, algorithm=call.algorithm)
            return
        given = {"buf": received, "sendbuf": sent, "recvbuf": received, "op": MPI.SUM, "root": call.root}
        if call.in_place:
            # In place the receive buffer of a reduction is as long as its input.
            given |= {"sendbuf": MPI.IN_PLACE, "recvbuf": sent if row.reduces else received}
        getattr(comm, row.name)(*(given[name] for name in row.arguments), algorithm=call.algorithm)

    def _sources(self, call: Call) -> tuple[np.uint32, np.uint32, np.uint64, np.uint64]:
        """Return the first rank and the number of ranks whose values are added, the block, and its first element."""
        rank, size, row = self._comm.rank, self._comm.size, call.row
        first, sources = 0, 1
        if row is None:
            first = self._previous
        elif row.reduces:
            sources = size
        elif row.rooted in ("send", "bcast"):
            first = call.root
        start = rank if call.sends_blocks else 0
        return np.uint32(first), np.uint32(sources), np.uint64(call.count), np.uint64(start * call.count)


@contextlib.contextmanager
def checked(comm: mpicomm.Communicator, calls: Sequence[Call], xp: Any) -> Iterator[CheckedSequence]:
    """Give a sequence that has run once, and check it at the end. Collective."""
    sequence = CheckedSequence(comm, calls, xp)
    sequence.run()
    xp.cuda.get_current_stream().synchronize()  # the caller may go on with it on another stream
    yield sequence
    xp.cuda.Device().synchronize()
    sequence.check()
    sequence.close()


def idle_kernel(xp: Any) -> Any:
    """Return a kernel, of one thread, that keeps its stream busy for as many cycles as its argument says."""
    return xp.RawKernel(_IDLE, "idle")
