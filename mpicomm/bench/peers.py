"""The libraries that the bench compares, of one base: mpicomm, MPI, and others in modules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.api.communicator import Communicator
from mpicomm.bench.measure import Call, Machine, UnsupportedError
from mpicomm.bench.operations import IN_PLACE, ROOT, SENDRECV, Case, CaseBuffers, buffers
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS
from mpicomm.collectives.operations import Operation as Collective
from mpicomm.collectives.wire import Wire
from mpicomm.mpi import types
from mpicomm.mpi.spec import Shape

PEERS = {
    "nccl": "nvidia_peers.Nccl",
    "nccl-symmetric": "nvidia_peers.SymmetricNccl",
    "torch": "torch_peers.TorchSymmetric",
    "nvshmem": "nvidia_peers.Nvshmem",
    "mpi": "peers.PlainMpi",
}
"""Their names on the command line, and their classes, which take a communicator and a `Machine`."""

_LARGEST_STAGED = 64 << 20  # larger sizes take minutes and show nothing new
_IN_RANK_ORDER = {algorithm.name for algorithm in ALGORITHMS if algorithm.in_rank_order}
_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN, "avg": mpicomm.AVG}


P = TypeVar("P", bound="Peer")
OWN = "mpicomm"
ORDINARY = "mpicomm-ordinary"
UNCODED = "mpicomm-uncoded"


class Peer:
    """A library in use, and the two arrays of its calls. All methods but `missing` are collective."""

    name = ""
    version = ""
    exact = False
    """Whether its reductions are in rank order, so that the bench can compare every bit."""
    capturable = True
    """Whether CUDA graphs can capture its calls."""
    result_at_front = True
    """Whether an in-place reduce-scatter leaves its block at the front of the buffer."""
    error = 0.0
    """The most by which an element of each rank, of magnitude 1, may change on its way."""
    first: Any = None
    second: Any = None

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        self._comm = comm
        self._machine = machine

    @property
    def own(self) -> bool:
        """Whether it is mpicomm. Failures of mpicomm end the run."""
        return self.name in (OWN, ORDINARY, UNCODED)

    @staticmethod
    def missing() -> str | None:
        """Return the package to install, or None. Local."""
        return None

    def allocate(self, nbytes: int) -> Any:
        """Return memory of the kind that is fastest for this library, as a NumPy or CuPy array of bytes."""
        return self._machine.empty(nbytes)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return the ways to carry out a case, by name. The fastest way counts. Raises `UnsupportedError`."""
        raise NotImplementedError

    def close(self) -> None:
        """Free everything."""

    def named(self: P, name: str, nbytes: int) -> P:
        """Return the peer with a name, and with arrays of ``nbytes`` unless 0."""
        self.name = name
        if nbytes == 0:
            return self
        self.first, self.second = self.allocate(nbytes), self.allocate(nbytes)
        with self._machine.current():
            for array in (self.first, self.second):
                array.fill(0)  # because calls that vary read bytes that no case has written, perhaps slow numbers
        self._machine.finish()
        return self

    def buffers(self, case: Case, shift: int = 0) -> CaseBuffers:
        """Return the buffers of a case, ``shift`` bytes into the two arrays."""
        return buffers(case, self.first[shift:], self.second[shift:], result_at_front=self.result_at_front)


def view_bytes(pointer: int, nbytes: int, owner: object) -> Any:
    """Return device memory of another library as a CuPy array of bytes."""
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, nbytes, owner)
    return cupy.ndarray((nbytes,), cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))


class Mpicomm(Peer):
    """mpicomm's public calls. ``symmetric`` says whether its arrays come from ``comm.empty``."""

    version = mpicomm.__version__

    def __init__(
        self, comm: Communicator, machine: Machine, *, symmetric: bool, algorithm: str, wire: Wire | None = None
    ) -> None:
        super().__init__(comm, machine)
        self._symmetric = symmetric
        # On the host "auto" may leave a call to MPI, which reduces in any order.
        self.exact = machine.stream is not None if algorithm == "auto" else algorithm in _IN_RANK_ORDER
        self._options: dict[str, Any] = {}
        if machine.stream is not None:
            self._options["stream"] = machine.stream
        if algorithm != "auto":
            self._options["algorithm"] = algorithm
        if wire is not None:
            self._options["wire_dtype"] = wire.codes
            self.error = wire.error

    def allocate(self, nbytes: int) -> Any:
        """Return an array. A symmetric array lives until the communicator is freed."""
        return self._comm.empty(nbytes, np.uint8).local if self._symmetric else self._machine.empty(nbytes)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        return {"": mpi_call(self._comm, case, buffers, self._options)}


class PlainMpi(Peer):
    """mpi4py's own methods, on host arrays directly, on device arrays through pinned host copies."""

    capturable = False

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self.version = " ".join(MPI.Get_library_version().splitlines()[0].split())
        self._mpi = MPI.Intracomm(comm)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        if case.operation.reduces and (types.mpi_datatype(case.dtype) is None or case.op == "avg"):
            raise UnsupportedError(f"MPI has no {case.op} of {case.dtype}")
        if case.dtype.isbuiltin != 1:
            raise UnsupportedError(f"MPI has no {case.dtype}")
        stream = self._machine.stream
        if stream is None:
            return {"": mpi_call(self._mpi, case, buffers, {})}
        if case.nbytes > _LARGEST_STAGED:
            raise UnsupportedError("measured up to 64 MiB")
        if case.in_place and case.operation.places != (IN_PLACE,):
            raise UnsupportedError("copies through the host are never in place")
        send = _pinned(buffers.send)
        receive = send if buffers.receive is buffers.send else _pinned(buffers.receive)
        call = mpi_call(self._mpi, case, CaseBuffers(send, receive), {})

        def run() -> None:
            if send is not None:
                buffers.send.get(out=send, stream=stream, blocking=False)
            stream.synchronize()
            call()
            if receive is not None:
                buffers.receive.set(receive, stream=stream)

        return {"": run}


def _pinned(array: Any) -> Any:
    if array is None:
        return None
    import cupyx

    return cupyx.empty_pinned(array.shape, np.uint8)


def mpi_call(comm: MPI.Intracomm, case: Case, buffers: CaseBuffers, options: dict[str, Any]) -> Call:
    """Return a case as a call of ``comm``'s method, of mpi4py or mpicomm, with these keyword arguments."""
    collective = case.operation.collective
    if collective is not None:
        return partial(getattr(comm, collective.name), *_arguments(collective, case, buffers), **options)
    if case.operation is SENDRECV:
        # The buffers go as bytes, because MPI carries messages of host arrays and does not know all types.
        to, (source,) = (case.rank + 1) % case.size, case.sources
        return partial(comm.Sendrecv, buffers.send, to, recvbuf=buffers.receive, source=source, **options)
    return partial(comm.Barrier, **options)


def _arguments(collective: Collective, case: Case, buffers: CaseBuffers) -> list[Any]:
    send = _buffer(buffers.send, case, collective.send, case.sent)
    receive = _buffer(buffers.receive, case, collective.receive, case.received)
    given = {"buf": receive, "sendbuf": send, "recvbuf": receive, "op": _OPS[case.op], "root": ROOT}
    if case.shares_buffer:
        given["recvbuf" if collective.rooted == "send" else "sendbuf"] = MPI.IN_PLACE
        if collective.reduces:
            given["recvbuf"] = send  # one buffer holds the input of all blocks, and the result goes to its front
    return [given[name] for name in collective.arguments]


def _buffer(array: Any, case: Case, shape: Shape, layout: Callable[[], tuple[list[int], list[int]]]) -> Any:
    """Return bytes as a buffer of elements. A type that is not NumPy's own gives a buffer with the name of the type.

    This buffer has no count, because in a buffer with a block for each rank a count is the count of one block.
    """
    if array is None:
        return None
    native = case.dtype.isbuiltin == 1
    places = [layout()] if shape == "vector" else []
    parts = [array.view(case.dtype) if native else array, *places, *([] if native else [case.dtype.name])]
    return parts if len(parts) > 1 else parts[0]
